"""The audit table, which has one row for every change made through the API or by the operator."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import AUDIT
from weft.serve.records.rows import DbRow, every


def note(
    tx: Tx, tenant: str, action: str, object: str = "", *, key: str | None = None, request: str = "", data: Any = None
) -> None:
    """Adds an action to the table; `data` must hold no secrets."""
    row = {"tenant": tenant, "key": key, "action": action, "object": object, "request": request, "data": data}
    tx.execute(sa.insert(AUDIT).values({**row, "created_at": int(now(tx))}))


def list_audit(tx: Tx, tenant: str, limit: int = 100) -> list[DbRow]:
    """Lists the latest actions of a tenant, newest first."""
    query = sa.select(AUDIT).where(AUDIT.c.tenant == tenant)
    return every(tx, query.order_by(AUDIT.c.seq.desc()).limit(limit))
