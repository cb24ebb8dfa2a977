"""The rows of uploaded files and result files; their bytes are in the file store under names of our own."""

from __future__ import annotations

import sqlalchemy as sa

from weft.job_state import FINAL_STATES
from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import FILES, JOBS, MODELS
from weft.serve.errors import NotFound
from weft.serve.records.rows import DbRow, Page, first, new_id, page

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
    row = first(tx, sa.select(FILES).where(FILES.c.tenant == tenant, FILES.c.id == id, *_live(tx)))
    if row is None:
        raise NotFound(f"No such File object: {id}", where="file_id")
    return row


def list_files(
    tx: Tx,
    tenant: str,
    after: str | None = None,
    limit: int = 10_000,
    *,
    purpose: str | None = None,
    newest_first: bool = True,
) -> Page:
    """Lists the tenant's files."""
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
    """Adds up the bytes of the tenant's files and models that are neither deleted nor expired."""
    live = ((FILES, _live(tx)), (MODELS, [MODELS.c.deleted_at.is_(None)]))
    total = 0
    for table, where in live:
        query = sa.select(sa.func.coalesce(sa.func.sum(table.c.bytes), 0))
        total += int(tx.execute(query.where(table.c.tenant == tenant, *where)).scalar_one())
    return total


def _live(tx: Tx) -> list[sa.ColumnElement[bool]]:
    at = int(now(tx))
    return [FILES.c.deleted_at.is_(None), sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > at)]


def is_needed(tx: Tx, tenant: str, id: str) -> bool:
    """Whether a job that has not ended still reads the file."""
    reads = sa.or_(JOBS.c.training_file == id, JOBS.c.validation_file == id)
    unfinished = JOBS.c.status.not_in(FINAL_STATES)
    return first(tx, sa.select(JOBS.c.id).where(JOBS.c.tenant == tenant, reads, unfinished)) is not None
