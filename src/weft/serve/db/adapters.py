"""Adapters in directories of the operator's: those that a scan found, and those that an admin loaded.

They are no tenant's: every tenant may use them. `root` is the directory that was scanned, so that services on one
database may have different ones.
"""

from __future__ import annotations

import hashlib
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import DbRow, Tx, every, first
from weft.serve.db.tables import ADAPTERS

BY_API = ""
"""The root of adapters that an admin loaded by name."""
_SOURCE, _JOB = "folder:", "job:"


def source_of(row: DbRow) -> str:
    """What a worker reads instead of an archive: the folder, and the version that it must have."""
    return f"{_SOURCE}{row['version']}:{row['path']}"


def folder_of(source: str) -> tuple[str, str] | None:
    """The version and the folder of a source; None for the name of an archive."""
    if not source.startswith(_SOURCE):
        return None
    version, _, path = source.removeprefix(_SOURCE).partition(":")
    return version, path


def source_of_job(job: DbRow) -> str:
    """What a worker reads to answer with a job that it trains; it changes with the steps."""
    return f"{_JOB}{job['id']}@{job['step']}"


def job_of(source: str) -> str | None:
    """The job of a source; None for any other."""
    return source.removeprefix(_JOB).partition("@")[0] if source.startswith(_JOB) else None


def short_name(source: str) -> str:
    """By which workers report what they have in memory."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def list_adapters(tx: Tx, root: str) -> list[DbRow]:
    """All adapters of a service, also the broken ones."""
    query = sa.select(ADAPTERS).where(ADAPTERS.c.root.in_((root, BY_API)))
    return every(tx, query.order_by(ADAPTERS.c.name, ADAPTERS.c.root))


def find_adapter(tx: Tx, root: str, name: str) -> DbRow | None:
    """One adapter; one that an admin loaded comes before one that was found."""
    query = sa.select(ADAPTERS).where(ADAPTERS.c.root.in_((root, BY_API)), ADAPTERS.c.name == name)
    return first(tx, query.order_by(ADAPTERS.c.root))


def put_adapter(tx: Tx, root: str, name: str, **columns: Any) -> None:
    remove_adapter(tx, root, name)
    tx.execute(sa.insert(ADAPTERS).values({"root": root, "name": name, **columns}))


def remove_adapter(tx: Tx, root: str, name: str) -> bool:
    """True if there was one."""
    return bool(tx.execute(sa.delete(ADAPTERS).where(ADAPTERS.c.root == root, ADAPTERS.c.name == name)).rowcount)


def note_check(tx: Tx, row: DbRow, error: str | None) -> None:
    """What a worker found out about a version, unless there is another one by now."""
    same = [ADAPTERS.c[name] == row[name] for name in ("root", "name", "version")]
    tx.execute(sa.update(ADAPTERS).where(*same).values(is_checked=True, error=error))
