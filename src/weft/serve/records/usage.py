"""What a tenant used: trained tokens from its jobs, prompt and completion tokens from its requests.

A job's trained tokens are a value the worker sets, never a sum it adds to, so a crash cannot count them twice.
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
    """Counts the tokens of one request; the same request told again counts once."""
    if first(tx, sa.select(USAGE).where(USAGE.c.request == request, USAGE.c.kind == kind)) is None:
        row = {"tenant": tenant, "job": job, "model": model, "kind": kind, "tokens": tokens, "request": request}
        tx.execute(sa.insert(USAGE).values({**row, "created_at": int(now(tx))}))


def usage_of(tx: Tx, tenant: str, *, start: int | None = None, end: int | None = None) -> dict[str, Any]:
    """Tokens of a tenant by kind, in all and by model, of what began within [start, end)."""
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
