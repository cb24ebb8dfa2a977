"""Databases with all tables and no rows; a migration, which other tests are about, takes ten times as long."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import sqlalchemy as sa

from weft.serve.db.engine import Database, DbRow, Tx, every, migrate, open_database, revision
from weft.serve.db.tables import AUDIT, METADATA


@functools.cache
def sqlite_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        database = open_database(f"sqlite:///{directory}/weft.db")
        migrate(database)
        database.close()
        return (Path(directory) / "weft.db").read_bytes()


def drop_everything(database: Database) -> None:
    with database.begin() as tx:
        METADATA.drop_all(tx)
        tx.execute(sa.text("DROP TABLE IF EXISTS alembic_version"))


def clear(database: Database) -> None:
    """Leaves no row in a PostgreSQL database; migrates it if it is not."""
    with database.begin() as tx:
        if revision(tx) is not None:
            tables = ", ".join(table.name for table in METADATA.sorted_tables)
            tx.execute(sa.text(f"TRUNCATE {tables} RESTART IDENTITY"))
            return
    drop_everything(database)
    migrate(database)


def audited(tx: Tx, tenant: str) -> list[DbRow]:
    """The noted actions of a tenant, newest first."""
    return every(tx, sa.select(AUDIT).where(AUDIT.c.tenant == tenant).order_by(AUDIT.c.seq.desc()))
