"""Workers: who is alive, on which backbone, and where it answers prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import WORKERS
from weft.serve.records.rows import Record, every

ALIVE_S = 30.0
"""A worker not seen for this long is taken for dead."""


def put_worker(
    tx: Tx,
    id: str,
    *,
    base_model: str,
    address: str | None,
    token: str | None,
    info: Mapping[str, Any],
    is_draining: bool = False,
) -> None:
    """A sign of life: the worker's row is made, or is as said here and seen now."""
    at = now(tx)
    values = {
        "base_model": base_model,
        "address": address,
        "token": token,
        "seen_at": at,
        "is_draining": is_draining,
        "info": dict(info),
    }
    if tx.execute(sa.update(WORKERS).where(WORKERS.c.id == id).values(values)).rowcount == 0:
        tx.execute(sa.insert(WORKERS).values({"id": id, "started_at": int(at), **values}))


def remove_worker(tx: Tx, id: str) -> None:
    """The worker has ended."""
    tx.execute(sa.delete(WORKERS).where(WORKERS.c.id == id))


def live_workers(tx: Tx, base_model: str | None = None) -> list[Record]:
    """Workers seen lately, the latest first; of one backbone or of all."""
    query = sa.select(WORKERS).where(WORKERS.c.seen_at > now(tx) - ALIVE_S).order_by(WORKERS.c.seen_at.desc())
    return every(tx, query.where(WORKERS.c.base_model == base_model) if base_model else query)
