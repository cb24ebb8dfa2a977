"""The rows of fine-tuned models: the adapters that jobs made."""

from __future__ import annotations

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import MODELS
from weft.serve.errors import NotFound
from weft.serve.records.rows import DbRow, every, first


def model_name(base: str, tenant: str, suffix: str | None, job: str) -> str:
    """Returns the name of the model a job makes: `ft:<base>:<tenant>:<suffix>:<end of the job's id>`."""
    return f"ft:{base}:{tenant}:{suffix or ''}:{job.removeprefix('ftjob-')[:8]}"


def create_model(tx: Tx, tenant: str, id: str, *, job: str, base: str, blob: str, bytes: int) -> DbRow:
    """Adds the row of a model whose archive is already in the file store."""
    row = {"id": id, "tenant": tenant, "job": job, "base": base, "blob": blob, "bytes": bytes}
    tx.execute(sa.insert(MODELS).values({**row, "created_at": int(now(tx))}))
    return get_model(tx, tenant, id)


def get_model(tx: Tx, tenant: str, id: str) -> DbRow:
    """Finds a fine-tuned model of the tenant that is not deleted."""
    query = sa.select(MODELS).where(MODELS.c.tenant == tenant, MODELS.c.id == id, MODELS.c.deleted_at.is_(None))
    row = first(tx, query)
    if row is None:
        raise NotFound(f"The model '{id}' does not exist or you do not have access to it.", where="model")
    return row


def list_models(tx: Tx, tenant: str) -> list[DbRow]:
    """Lists the fine-tuned models of the tenant, oldest first."""
    query = sa.select(MODELS).where(MODELS.c.tenant == tenant, MODELS.c.deleted_at.is_(None))
    return every(tx, query.order_by(MODELS.c.seq))


def delete_model(tx: Tx, tenant: str, id: str) -> DbRow:
    """Marks a model as deleted; the caller deletes the archive after the transaction."""
    row = get_model(tx, tenant, id)
    tx.execute(sa.update(MODELS).where(MODELS.c.seq == row["seq"]).values(deleted_at=int(now(tx))))
    return row
