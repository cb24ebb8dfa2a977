"""The rows of workers: which are alive, on which machine and backbone, and where they answer prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import JOBS, WORKERS
from weft.serve.records.rows import DbRow, every

ALIVE_S = 30.0
"""A worker that has not said for how long it may be silent counts as lost after so many seconds."""

FORGOTTEN_S = 24 * 3600.0
"""How long operators see a worker that is lost."""


def put_worker(
    tx: Tx,
    id: str,
    *,
    base_model: str,
    address: str | None,
    token: str | None,
    info: Mapping[str, Any],
    is_draining: bool = False,
    machine: str | None = None,
    lease_s: float = ALIVE_S,
) -> None:
    """Adds or updates a worker's row, and notes that the worker is alive now and for `lease_s` without another word.

    What the operator wants of the worker stays as it is.
    """
    at = now(tx)
    values = {
        "base_model": base_model,
        "address": address,
        "token": token,
        "seen_at": at,
        "is_draining": is_draining,
        "info": dict(info),
        "machine": machine,
        "lease_s": lease_s,
    }
    if tx.execute(sa.update(WORKERS).where(WORKERS.c.id == id).values(values)).rowcount == 0:
        tx.execute(sa.insert(WORKERS).values({"id": id, "started_at": int(at), **values}))


def wanted_of(tx: Tx, id: str) -> str | None:
    """Returns what the operator wants of a worker: drain, remove or nothing."""
    wanted = tx.execute(sa.select(WORKERS.c.wanted).where(WORKERS.c.id == id)).scalar_one_or_none()
    return None if wanted is None else str(wanted)


def is_lost(row: DbRow, at: float) -> bool:
    """Whether a worker has been silent for longer than it may be."""
    return bool(row["seen_at"] + (row["lease_s"] or ALIVE_S) <= at)


def remove_worker(tx: Tx, id: str) -> None:
    """Removes the row of a worker that has ended."""
    tx.execute(sa.delete(WORKERS).where(WORKERS.c.id == id))


def forget_lost_workers(tx: Tx) -> None:
    """Removes the rows of workers that have been lost for a day; nobody looks for them any more."""
    tx.execute(sa.delete(WORKERS).where(WORKERS.c.seen_at < now(tx) - FORGOTTEN_S))


def live_workers(tx: Tx, base_model: str | None = None) -> list[DbRow]:
    """Lists the workers that are alive, the one seen last first; of one backbone or of all."""
    heard = WORKERS.c.seen_at + sa.func.coalesce(WORKERS.c.lease_s, ALIVE_S) > now(tx)
    query = sa.select(WORKERS).where(heard).order_by(WORKERS.c.seen_at.desc())
    return every(tx, query.where(WORKERS.c.base_model == base_model) if base_model else query)


def all_workers(tx: Tx) -> list[DbRow]:
    """Lists all workers by machine, also those that are lost, the oldest of each first."""
    return every(tx, sa.select(WORKERS).order_by(WORKERS.c.machine, WORKERS.c.started_at, WORKERS.c.id))


def held_by_worker(tx: Tx) -> dict[str, int]:
    """Counts the jobs that each worker holds."""
    counted = sa.select(JOBS.c.worker, sa.func.count()).where(
        JOBS.c.status.in_(("queued", "running")), JOBS.c.lease_until > now(tx)
    )
    return {str(worker): int(number) for worker, number in tx.execute(counted.group_by(JOBS.c.worker))}


def worker_state(row: DbRow, num_held: int, at: float) -> str:
    """Says how a worker is: alive, draining, drained, leaving or lost."""
    if is_lost(row, at):
        return "lost"
    if row["wanted"] == "drain":
        return "draining" if num_held else "drained"
    return "leaving" if row["is_draining"] or row["wanted"] == "remove" else "alive"
