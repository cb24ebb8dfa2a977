"""Databases for the tests of the service: SQLite always, PostgreSQL where the machine has its binaries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from postgres_server import Server, find_binaries, running_postgres

from weft.serve.db.engine import Database, migrate, open_database
from weft.serve.db.tables import METADATA
from weft.serve.db.tenants import create_tenant

KINDS = ["sqlite", *(["postgresql"] if find_binaries() else [])]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """One server for the whole session."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=KINDS)
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        database = open_database(f"sqlite:///{tmp_path}/weft.db", lock_wait_s=5)
    else:
        database = open_database(request.getfixturevalue("postgres").url)
        with database.begin() as tx:
            METADATA.drop_all(tx)
            tx.execute(sa.text("DROP TABLE IF EXISTS alembic_version"))
    yield database
    database.close()


@pytest.fixture
def database(bare: Database) -> Database:
    """A migrated database of each kind with the tenants `acme` and `globex`."""
    migrate(bare)
    with bare.begin() as tx:
        create_tenant(tx, "acme")
        create_tenant(tx, "globex")
    return bare
