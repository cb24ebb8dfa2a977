"""Deletes blobs that no row names any more: those of deleted and expired files, and of uploads that a crash cut short.

A blob is written before the row that names it, so a blob counts as left over only when it is a day old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import sqlalchemy as sa

from weft.errors import StorageError
from weft.job_state import FINAL_STATES
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, Tx, now
from weft.serve.db.tables import CHECKPOINTS, FILES, JOBS, MODELS

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
    """Says of a row of files whether its bytes are needed: if deleted, until the jobs that read it have ended."""
    unfinished = sa.select(JOBS.c.id).where(
        JOBS.c.status.not_in(FINAL_STATES),
        sa.or_(JOBS.c.training_file == FILES.c.id, JOBS.c.validation_file == FILES.c.id),
    )
    lives = sa.and_(FILES.c.deleted_at.is_(None), sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > now(tx)))
    return sa.or_(lives, unfinished.exists())


def named_blobs(tx: Tx) -> set[str]:
    """Returns the blobs that a row still needs."""
    queries = (
        sa.select(FILES.c.blob).where(file_is_needed(tx)),
        sa.select(MODELS.c.blob).where(MODELS.c.deleted_at.is_(None)),
        sa.select(CHECKPOINTS.c.blob).where(CHECKPOINTS.c.blob.is_not(None)),
        sa.select(JOBS.c.saved_blob).where(JOBS.c.saved_blob.is_not(None)),
    )
    return {str(name) for query in queries for name in tx.execute(query).scalars()}
