"""What a tenant has used: the trained tokens of its jobs, and the prompt and completion tokens of its requests.

The worker sets a job's trained tokens and never adds to them, so a crash cannot count them twice.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import JOBS, USAGE
from weft.serve.records.rows import every, first


def add_usage(
    tx: Tx, tenant: str, request: str, *, kind: str, tokens: int, model: str | None = None, job: str | None = None
) -> None:
    """Counts the tokens of one request; a request that is reported again is counted once."""
    if first(tx, sa.select(USAGE).where(USAGE.c.request == request, USAGE.c.kind == kind)) is None:
        row = {"tenant": tenant, "job": job, "model": model, "kind": kind, "tokens": tokens, "request": request}
        tx.execute(sa.insert(USAGE).values({**row, "created_at": int(now(tx))}))


def usage_of(tx: Tx, tenant: str, *, start: int | None = None, end: int | None = None) -> dict[str, Any]:
    """Adds up a tenant's tokens by kind, in total and by model, of jobs and requests that began in [start, end)."""
    trained = sa.select(
        JOBS.c.model,
        sa.literal("trained").label("kind"),
        sa.func.sum(JOBS.c.trained_tokens).label("tokens"),
        sa.func.count().label("num"),
    ).where(JOBS.c.tenant == tenant, *_between(JOBS.c.created_at, start, end))
    asked = sa.select(
        USAGE.c.model, USAGE.c.kind, sa.func.sum(USAGE.c.tokens).label("tokens"), sa.func.count().label("num")
    ).where(USAGE.c.tenant == tenant, *_between(USAGE.c.created_at, start, end))
    rows = every(tx, trained.group_by(JOBS.c.model)) + every(tx, asked.group_by(USAGE.c.model, USAGE.c.kind))
    totals = {kind: sum(int(r["tokens"]) for r in rows if r["kind"] == kind) for kind in KINDS}
    by_model = [
        {"model": r["model"], "kind": r["kind"], "tokens": int(r["tokens"]), "num": int(r["num"])} for r in rows
    ]
    return {"totals": totals, "by_model": by_model}


KINDS = ("trained", "prompt", "completion")


def _between(column: Any, start: int | None, end: int | None) -> list[sa.ColumnElement[bool]]:
    where = []
    if start is not None:
        where.append(column >= start)
    if end is not None:
        where.append(column < end)
    return where
