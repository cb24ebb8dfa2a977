"""Clears up behind workers whose process is gone, when another starts in the same data directory."""

from __future__ import annotations

import sqlalchemy as sa

from weft.serve.db.engine import Database
from weft.serve.db.tables import JOBS
from weft.serve.jobs.claim import give_up
from weft.serve.jobs.states import FINAL
from weft.serve.records.workers import remove_worker
from weft.serve.worker.directory import WorkDirectory


def clear_up(database: Database, work: WorkDirectory) -> None:
    """Nobody waits for the leases of workers that are gone, and what they left of jobs that are over goes."""
    gone = work.abandoned()
    if gone:
        with database.begin() as tx:
            for worker in gone:
                give_up(tx, worker)
                remove_worker(tx, worker)
    work.sweep([], lambda job: _is_over(database, job))


def _is_over(database: Database, job: str) -> bool:
    with database.read() as tx:
        status = tx.execute(sa.select(JOBS.c.status).where(JOBS.c.id == job)).scalar_one_or_none()
    return status in (None, *FINAL)
