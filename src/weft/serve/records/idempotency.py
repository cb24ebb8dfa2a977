"""Idempotency keys: a request that was accepted once is answered again, but not carried out again."""

from __future__ import annotations

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import IDEMPOTENCY
from weft.serve.errors import Conflict
from weft.serve.records.rows import first

KEPT_S = 24 * 3600


def take_key(tx: Tx, tenant: str, key: str, request_hash: str, object_id: str) -> str | None:
    """Binds a key to the object the request is about to make, or returns the id of the one it made before.

    The insert decides between two simultaneous requests: the second waits for the first and then finds its row.
    """
    mine = [IDEMPOTENCY.c.tenant == tenant, IDEMPOTENCY.c.key == key]
    tx.execute(sa.delete(IDEMPOTENCY).where(*mine, IDEMPOTENCY.c.created_at < int(now(tx)) - KEPT_S))
    row = {"tenant": tenant, "key": key, "request_hash": request_hash, "object_id": object_id}
    if tx.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    query = insert(IDEMPOTENCY).values({**row, "created_at": int(now(tx))}).on_conflict_do_nothing()
    if tx.execute(query.returning(IDEMPOTENCY.c.key)).first() is not None:
        return None
    return find_key_use(tx, tenant, key, request_hash)


def find_key_use(tx: Tx, tenant: str, key: str, request_hash: str) -> str | None:
    """Returns the id of the object a key made before, or None; raises Conflict if the request was another."""
    recent = IDEMPOTENCY.c.created_at >= int(now(tx)) - KEPT_S
    query = sa.select(IDEMPOTENCY).where(IDEMPOTENCY.c.tenant == tenant, IDEMPOTENCY.c.key == key, recent)
    found = first(tx, query)
    if found is None:
        return None
    if found["request_hash"] != request_hash:
        raise Conflict("This Idempotency-Key was used with another request; use a new one.", where="Idempotency-Key")
    return str(found["object_id"])
