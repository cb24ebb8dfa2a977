"""The rows of what has bytes in the file store: files, uploads in parts, and models with their checkpoints.

A part of an upload is a blob that only its row names. Parts of uploads that were cancelled, completed or left alone
need no deleting of their own: once a day, blobs that no row names are deleted, as are those of deleted and expired
files and of uploads that a crash cut short. A blob is written before the row that names it, so a blob counts as left
over only when it is a day old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from weft.errors import StorageError
from weft.job_state import FINAL_STATES
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, DbRow, Page, Tx, every, first, new_id, now, one, page, total
from weft.serve.db.tables import CHECKPOINTS, FILES, JOBS, MODELS, UPLOAD_PARTS, UPLOADS
from weft.serve.errors import NotFound, NotPossible

RESULTS = "fine-tune-results"


def create_file(
    tx: Tx,
    tenant: str,
    *,
    filename: str,
    purpose: str,
    bytes: int,
    sha256: str,
    blob: str,
    expires_in_s: int | None = None,
    status: str = "processed",
) -> DbRow:
    """Adds the row of a file whose bytes are already in the file store."""
    at = int(now(tx))
    row = {
        "id": new_id("file-"),
        "tenant": tenant,
        "filename": filename,
        "purpose": purpose,
        "bytes": bytes,
        "sha256": sha256,
        "blob": blob,
        "status": status,
        "created_at": at,
        "expires_at": None if expires_in_s is None else at + expires_in_s,
    }
    tx.execute(sa.insert(FILES).values(row))
    return get_file(tx, tenant, str(row["id"]))


def get_file(tx: Tx, tenant: str, id: str) -> DbRow:
    """Finds a file of the tenant that is neither deleted nor expired."""
    query = sa.select(FILES).where(FILES.c.tenant == tenant, FILES.c.id == id, *_live(tx))
    return one(tx, query, NotFound(f"No such File object: {id}", where="file_id"))


def list_files(
    tx: Tx,
    tenant: str,
    after: str | None = None,
    limit: int = 10_000,
    *,
    purpose: str | None = None,
    newest_first: bool = True,
) -> Page:
    where = [FILES.c.tenant == tenant, *_live(tx)]
    if purpose is not None:
        where.append(FILES.c.purpose == purpose)
    return page(tx, FILES, where, after=after, limit=limit, newest_first=newest_first)


def delete_file(tx: Tx, tenant: str, id: str) -> DbRow:
    """Marks a file as deleted; the caller deletes the blob after the transaction."""
    row = get_file(tx, tenant, id)
    tx.execute(sa.update(FILES).where(FILES.c.seq == row["seq"]).values(deleted_at=int(now(tx))))
    return row


def stored_bytes(tx: Tx, tenant: str) -> int:
    of_files = total(tx, FILES.c.bytes, FILES.c.tenant == tenant, *_live(tx))
    return of_files + total(tx, MODELS.c.bytes, MODELS.c.tenant == tenant, MODELS.c.deleted_at.is_(None))


def _live(tx: Tx) -> list[sa.ColumnElement[bool]]:
    at = int(now(tx))
    return [FILES.c.deleted_at.is_(None), sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > at)]


def is_needed(tx: Tx, tenant: str, id: str) -> bool:
    """Whether a job that has not ended still reads the file."""
    reads = sa.or_(JOBS.c.training_file == id, JOBS.c.validation_file == id)
    unfinished = JOBS.c.status.not_in(FINAL_STATES)
    return first(tx, sa.select(JOBS.c.id).where(JOBS.c.tenant == tenant, reads, unfinished)) is not None


PENDING_S = 3600
"""How long an upload may take, from its beginning to its completion."""


def create_upload(tx: Tx, tenant: str, *, filename: str, purpose: str, bytes: int, keep_s: int | None) -> DbRow:
    at = int(now(tx))
    row = {
        "id": new_id("upload_"),
        "tenant": tenant,
        "filename": filename,
        "purpose": purpose,
        "bytes": bytes,
        "status": "pending",
        "keep_s": keep_s,
        "created_at": at,
        "expires_at": at + PENDING_S,
    }
    tx.execute(sa.insert(UPLOADS).values(row))
    return get_upload(tx, tenant, str(row["id"]))


def get_upload(tx: Tx, tenant: str, id: str, *, for_update: bool = False) -> DbRow:
    """Finds an upload of the tenant; one that was not completed in time is `expired`."""
    query = sa.select(UPLOADS).where(UPLOADS.c.tenant == tenant, UPLOADS.c.id == id)
    row = one(tx, query, NotFound(f"No such Upload object: {id}", where="upload_id"), for_update=for_update)
    if row["status"] == "pending" and row["expires_at"] <= now(tx):
        return {**row, "status": "expired"}
    return row


def open_upload(tx: Tx, tenant: str, id: str, *, for_update: bool = False) -> DbRow:
    """Finds an upload that still takes parts; raises NotPossible if it does not."""
    row = get_upload(tx, tenant, id, for_update=for_update)
    if row["status"] != "pending":
        raise NotPossible(f"Upload {id} is {row['status']} and takes no more.", where="upload_id")
    return row


def end_upload(tx: Tx, tenant: str, id: str, status: str, *, file: str | None = None) -> None:
    """Marks an upload as `completed` or `cancelled`; the caller deletes its parts after the transaction."""
    mine = sa.and_(UPLOADS.c.tenant == tenant, UPLOADS.c.id == id)
    tx.execute(sa.update(UPLOADS).where(mine).values(status=status, file=file))


def add_part(tx: Tx, tenant: str, upload: str, *, bytes: int, blob: str) -> DbRow:
    row = {"id": new_id("part_"), "tenant": tenant, "upload": upload, "bytes": bytes, "blob": blob}
    tx.execute(sa.insert(UPLOAD_PARTS).values({**row, "created_at": int(now(tx))}))
    return get_parts(tx, tenant, upload, [row["id"]])[0]


def get_parts(tx: Tx, tenant: str, upload: str, ids: Sequence[object] | None = None) -> list[DbRow]:
    """Returns the parts with these ids in this order, or all as they came; raises NotFound for an unknown id."""
    query = sa.select(UPLOAD_PARTS).where(UPLOAD_PARTS.c.tenant == tenant, UPLOAD_PARTS.c.upload == upload)
    parts = {row["id"]: row for row in every(tx, query.order_by(UPLOAD_PARTS.c.seq))}
    for id in ids or ():
        if id not in parts:
            raise NotFound(f"No such part of this upload: {id}", where="part_ids")
    return list(parts.values()) if ids is None else [parts[id] for id in ids]


def pending_bytes(tx: Tx, tenant: str) -> int:
    is_pending = (UPLOADS.c.status == "pending", UPLOADS.c.expires_at > now(tx))
    return total(tx, UPLOADS.c.bytes, UPLOADS.c.tenant == tenant, *is_pending)


def model_name(base: str, tenant: str, suffix: str | None, job: str) -> str:
    """Returns the name of the model a job makes: `ft:<base>:<tenant>:<suffix>:<end of the job's id>`."""
    return f"ft:{base}:{tenant}:{suffix or ''}:{job.removeprefix('ftjob-')[:8]}"


def job_of_model(tx: Tx, tenant: str, name: str) -> DbRow | None:
    """The job whose model has this name, or is to have it."""
    begin = f"ftjob-{name.rpartition(':')[2]}"
    query = sa.select(JOBS).where(JOBS.c.tenant == tenant, JOBS.c.id.startswith(begin, autoescape=True))
    found = every(tx, query.limit(10)) if name.startswith("ft:") else []
    return next((job for job in found if model_name(job["model"], tenant, job["suffix"], job["id"]) == name), None)


def create_model(tx: Tx, tenant: str, id: str, *, job: str, base: str, blob: str, bytes: int) -> DbRow:
    row = {"id": id, "tenant": tenant, "job": job, "base": base, "blob": blob, "bytes": bytes}
    tx.execute(sa.insert(MODELS).values({**row, "created_at": int(now(tx))}))
    return get_model(tx, tenant, id)


def get_model(tx: Tx, tenant: str, id: str) -> DbRow:
    query = sa.select(MODELS).where(MODELS.c.tenant == tenant, MODELS.c.id == id, MODELS.c.deleted_at.is_(None))
    return one(tx, query, missing_model(id))


def missing_model(name: str) -> NotFound:
    return NotFound(f"The model '{name}' does not exist or you do not have access to it.", where="model")


def list_models(tx: Tx, tenant: str) -> list[DbRow]:
    query = sa.select(MODELS).where(MODELS.c.tenant == tenant, MODELS.c.deleted_at.is_(None))
    return every(tx, query.order_by(MODELS.c.seq))


def delete_model(tx: Tx, tenant: str, id: str) -> DbRow:
    row = get_model(tx, tenant, id)
    tx.execute(sa.update(MODELS).where(MODELS.c.seq == row["seq"]).values(deleted_at=int(now(tx))))
    return row


def add_checkpoint(
    tx: Tx, tenant: str, job: str, step: int, *, model: str, metrics: Mapping[str, Any], blob: str | None = None
) -> DbRow:
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
    mine = sa.and_(CHECKPOINTS.c.tenant == tenant, CHECKPOINTS.c.job == job)
    return page(tx, CHECKPOINTS, [mine], after=after, limit=limit)


def get_checkpoint(tx: Tx, tenant: str, model: str) -> DbRow:
    """Finds a checkpoint by its id or by the name of its model (`ft:…:ckpt-step-88`)."""
    named = sa.or_(CHECKPOINTS.c.model == model, CHECKPOINTS.c.id == model)
    missing = NotFound(f"No such checkpoint: {model}", where="fine_tuned_model_checkpoint")
    return one(tx, sa.select(CHECKPOINTS).where(CHECKPOINTS.c.tenant == tenant, named), missing)


def delete_checkpoints(tx: Tx, tenant: str, *, model: str | None = None, job: str | None = None) -> list[DbRow]:
    """Deletes one checkpoint by its name, or all of a job; the caller deletes the archives after the transaction."""
    if model is not None:
        gone = [get_checkpoint(tx, tenant, model)]
    else:
        gone = every(tx, sa.select(CHECKPOINTS).where(CHECKPOINTS.c.tenant == tenant, CHECKPOINTS.c.job == job))
    tx.execute(sa.delete(CHECKPOINTS).where(CHECKPOINTS.c.seq.in_([row["seq"] for row in gone])))
    return gone


LOG = logging.getLogger("weft.serve")
LEFT_OVER_S = 24 * 3600.0


def delete_unnamed_blobs(database: Database, blobs: Blobs, *, older_than_s: float = LEFT_OVER_S) -> int:
    """Deletes the blobs that are left over, and returns how many there were."""
    before = time.time() - older_than_s
    old = [name for name, modified in blobs.names() if modified < before]
    with database.read() as tx:
        kept = named_blobs(tx)
    gone = [name for name in old if name not in kept]
    for name in gone:
        blobs.delete(name)
    if gone:
        LOG.info("tidied", extra={"fields": {"num_blobs": len(gone)}})
    return len(gone)


def discard(blobs: Blobs, names: Iterable[str]) -> None:
    """Deletes blobs that no row names; a blob that cannot be deleted now is left to `delete_unnamed_blobs`."""
    for name in names:
        try:
            blobs.delete(name)
        except StorageError as error:
            LOG.warning("a blob is left over: %s", error)


def file_is_needed(tx: Tx) -> sa.ColumnElement[bool]:
    """Whether the bytes of a row of files are needed: if deleted, until the jobs that read it have ended."""
    unfinished = sa.select(JOBS.c.id).where(
        JOBS.c.status.not_in(FINAL_STATES),
        sa.or_(JOBS.c.training_file == FILES.c.id, JOBS.c.validation_file == FILES.c.id),
    )
    lives = sa.and_(FILES.c.deleted_at.is_(None), sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > now(tx)))
    return sa.or_(lives, unfinished.exists())


def named_blobs(tx: Tx) -> set[str]:
    queries = (
        sa.select(FILES.c.blob).where(file_is_needed(tx)),
        sa.select(MODELS.c.blob).where(MODELS.c.deleted_at.is_(None)),
        sa.select(CHECKPOINTS.c.blob).where(CHECKPOINTS.c.blob.is_not(None)),
        sa.select(JOBS.c.saved_blob).where(JOBS.c.saved_blob.is_not(None)),
    )
    return {str(name) for query in queries for name in tx.execute(query).scalars()}
