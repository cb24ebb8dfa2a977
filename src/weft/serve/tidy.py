"""Deletes blobs that no row names any more: of deleted and expired files, and of uploads that a crash cut short.

A blob is written before the row that names it, so only what is a day old can be told to be left over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import sqlalchemy as sa

from weft.errors import StorageError
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, Tx, now
from weft.serve.db.tables import CHECKPOINTS, FILES, JOBS, MODELS
from weft.serve.jobs.states import FINAL

LOG = logging.getLogger("weft.serve")
LEFT_OVER_S = 24 * 3600.0


def tidy(database: Database, blobs: Blobs, *, older_than_s: float = LEFT_OVER_S) -> int:
    """Deletes what is left over, and returns how many blobs that were."""
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
    """Deletes what no row names; what cannot be deleted now is left to `tidy`."""
    for name in names:
        try:
            blobs.delete(name)
        except StorageError as error:
            LOG.warning("a blob is left over: %s", error)


def named_blobs(tx: Tx) -> set[str]:
    """Blobs that a row still needs; a deleted file is needed while a job that reads it has not ended."""
    unfinished = sa.select(JOBS.c.id).where(
        JOBS.c.status.not_in(FINAL), sa.or_(JOBS.c.training_file == FILES.c.id, JOBS.c.validation_file == FILES.c.id)
    )
    lives = sa.and_(FILES.c.deleted_at.is_(None), sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > now(tx)))
    queries = (
        sa.select(FILES.c.blob).where(sa.or_(lives, unfinished.exists())),
        sa.select(MODELS.c.blob).where(MODELS.c.deleted_at.is_(None)),
        sa.select(CHECKPOINTS.c.blob).where(CHECKPOINTS.c.blob.is_not(None)),
    )
    return {str(name) for query in queries for name in tx.execute(query).scalars()}
