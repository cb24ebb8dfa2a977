"""Databases for the tests of the service: SQLite always, PostgreSQL where the machine has its binaries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from migrated import clear, drop_everything, sqlite_file
from postgres_server import POSTGRES, Server, running_postgres

from weft.serve.db.engine import Database, open_database
from weft.serve.db.tenants import create_tenant


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """One server for the whole session."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", *POSTGRES])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bare(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database of each kind."""
    if kind == "sqlite":
        database = open_database(f"sqlite:///{tmp_path}/weft.db", lock_wait_s=5)
    else:
        database = open_database(request.getfixturevalue("postgres").url)
        drop_everything(database)
    yield database
    database.close()


@pytest.fixture
def database(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A migrated database of each kind with the tenants `acme` and `globex`."""
    if kind == "sqlite":
        (tmp_path / "weft.db").write_bytes(sqlite_file())
        database = open_database(f"sqlite:///{tmp_path}/weft.db", lock_wait_s=5)
    else:
        database = open_database(request.getfixturevalue("postgres").url)
        clear(database)
    with database.begin() as tx:
        create_tenant(tx, "acme")
        create_tenant(tx, "globex")
    yield database
    database.close()
