"""The events of jobs, which are appended and never changed."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import EVENTS
from weft.serve.errors import NotFound
from weft.serve.records.rows import DbRow, Page, new_id, page

_SINCE = (
    sa.select(EVENTS)
    .where(
        EVENTS.c.tenant == sa.bindparam("tenant"),
        EVENTS.c.job == sa.bindparam("job"),
        EVENTS.c.seq > sa.bindparam("seq"),
    )
    .order_by(EVENTS.c.seq)
    .limit(sa.bindparam("limit"))
)
"""The query is made once because every stream runs it all the time."""


def add_event(
    tx: Tx,
    tenant: str,
    job: str,
    level: str,
    message: str,
    type: str = "message",
    data: Any = None,
) -> str:
    """Appends an event to a job and returns its id; levels are info, warn and error, types message and metrics."""
    event = {
        "id": new_id("ftevent-"),
        "tenant": tenant,
        "job": job,
        "created_at": int(now(tx)),
        "level": level,
        "type": type,
        "message": message,
        "data": data,
    }
    tx.execute(sa.insert(EVENTS).values(event))
    return str(event["id"])


def list_events(tx: Tx, tenant: str, job: str, after: str | None = None, limit: int = 20) -> Page:
    """Lists the events of a job, newest first."""
    mine = sa.and_(EVENTS.c.tenant == tenant, EVENTS.c.job == job)
    return page(tx, EVENTS, [mine], after=after, limit=limit)


def events_since(tx: Tx, tenant: str, job: str, seq: int, limit: int = 500) -> list[DbRow]:
    """Returns the events of a job after number `seq`, oldest first: those that a stream sends next."""
    asked = {"tenant": tenant, "job": job, "seq": seq, "limit": limit}
    return [dict(row) for row in tx.execute(_SINCE, asked).mappings()]


def seq_of(tx: Tx, tenant: str, job: str, id: str) -> int:
    """Returns the number of an event of a job."""
    query = sa.select(EVENTS.c.seq).where(EVENTS.c.tenant == tenant, EVENTS.c.job == job, EVENTS.c.id == id)
    seq = tx.execute(query).scalar_one_or_none()
    if seq is None:
        raise NotFound(f"No such object: {id}", where="after")
    return int(seq)
