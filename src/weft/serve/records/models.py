"""The rows of fine-tuned models: the adapters that jobs made, and those of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import CHECKPOINTS, MODELS
from weft.serve.errors import NotFound
from weft.serve.records.rows import DbRow, Page, every, first, new_id, page


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


def add_checkpoint(
    tx: Tx, tenant: str, job: str, step: int, *, model: str, metrics: Mapping[str, Any], blob: str | None = None
) -> DbRow:
    """Adds the checkpoint of a job at a step, or replaces it if there is one of that step."""
    found = first(tx, sa.select(CHECKPOINTS).where(CHECKPOINTS.c.job == job, CHECKPOINTS.c.step == step))
    if found is not None:
        values = {"metrics": dict(metrics), "blob": blob or found["blob"], "model": model}
        tx.execute(sa.update(CHECKPOINTS).where(CHECKPOINTS.c.seq == found["seq"]).values(values))
        return {**found, **values}
    row = {
        "id": new_id("ftckpt_"),
        "tenant": tenant,
        "job": job,
        "step": step,
        "model": model,
        "metrics": dict(metrics),
        "blob": blob,
        "created_at": int(now(tx)),
    }
    tx.execute(sa.insert(CHECKPOINTS).values(row))
    return row


def list_checkpoints(tx: Tx, tenant: str, job: str, after: str | None = None, limit: int = 10) -> Page:
    """Lists the checkpoints of a job, newest first."""
    mine = sa.and_(CHECKPOINTS.c.tenant == tenant, CHECKPOINTS.c.job == job)
    return page(tx, CHECKPOINTS, [mine], after=after, limit=limit)


def get_checkpoint(tx: Tx, tenant: str, model: str) -> DbRow:
    """Finds a checkpoint by its id or by the name of its model (`ft:…:ckpt-step-88`)."""
    named = sa.or_(CHECKPOINTS.c.model == model, CHECKPOINTS.c.id == model)
    row = first(tx, sa.select(CHECKPOINTS).where(CHECKPOINTS.c.tenant == tenant, named))
    if row is None:
        raise NotFound(f"No such checkpoint: {model}", where="fine_tuned_model_checkpoint")
    return row


def delete_checkpoints(tx: Tx, tenant: str, *, model: str | None = None, job: str | None = None) -> list[DbRow]:
    """Deletes one checkpoint by its name, or all of a job; the caller deletes the archives after the transaction."""
    if model is not None:
        gone = [get_checkpoint(tx, tenant, model)]
    else:
        gone = every(tx, sa.select(CHECKPOINTS).where(CHECKPOINTS.c.tenant == tenant, CHECKPOINTS.c.job == job))
    tx.execute(sa.delete(CHECKPOINTS).where(CHECKPOINTS.c.seq.in_([row["seq"] for row in gone])))
    return gone
