"""The rows of jobs. Their status changes only through `weft.serve.jobs.states`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from weft.job_state import FINAL_STATES
from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import JOBS
from weft.serve.jobs.states import ask, find_job, move
from weft.serve.records.events import add_event
from weft.serve.records.rows import DbRow, Page, WatchedRows, new_id, page

__all__ = [
    "ask",
    "count_active",
    "create_job",
    "get_job",
    "list_jobs",
    "starting_from",
    "watched_job",
    "watched_newest_jobs",
]  # fmt: skip

_ONE = sa.select(JOBS).where(JOBS.c.tenant == sa.bindparam("tenant"), JOBS.c.id == sa.bindparam("id"))
"""The query is made once: clients run it all the time, and making it takes longer than reading the row."""


def get_job(tx: Tx, tenant: str, id: str) -> DbRow:
    """Finds a job of the tenant; raises NotFound if it has none with this id."""
    row = tx.execute(_ONE, {"tenant": tenant, "id": id}).mappings().first()
    return find_job(tx, tenant, id) if row is None else dict(row)


def watched_job(tenant: str, id: str) -> WatchedRows:
    """Returns the row to watch for `get_job`."""
    return WatchedRows("SELECT * FROM jobs WHERE tenant = ? AND id = ?", (tenant, id))


def watched_newest_jobs(tenant: str, limit: int) -> WatchedRows:
    """Returns the rows to watch for the first page of `list_jobs`, with the one that tells whether there are more."""
    return WatchedRows("SELECT * FROM jobs WHERE tenant = ? ORDER BY seq DESC LIMIT ?", (tenant, limit + 1))


def create_job(
    tx: Tx,
    tenant: str,
    *,
    model: str,
    training_file: str,
    settings: Mapping[str, Any],
    method: Mapping[str, Any] | None = None,
    validation_file: str | None = None,
    suffix: str | None = None,
    seed: int = 42,
    integrations: list[Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    priority: int = 0,
    planned_tokens: int | None = None,
    id: str | None = None,
) -> DbRow:
    """Adds a new job to the queue; the caller has checked its files."""
    job = {
        "id": id or new_id("ftjob-"),
        "tenant": tenant,
        "status": "validating_files",
        "model": model,
        "training_file": training_file,
        "validation_file": validation_file,
        "suffix": suffix,
        "seed": seed,
        "method": dict(method or {"type": "supervised", "supervised": {"hyperparameters": {}}}),
        "settings": dict(settings),
        "integrations": integrations or [],
        "metadata": dict(metadata) if metadata else None,
        "priority": priority,
        "planned_tokens": planned_tokens,
        "created_at": int(now(tx)),
        "result_files": [],
    }
    tx.execute(sa.insert(JOBS).values(job))
    add_event(tx, tenant, str(job["id"]), "info", f"Created fine-tuning job: {job['id']}")
    add_event(tx, tenant, str(job["id"]), "info", f"Validating training file: {training_file}")
    move(tx, tenant, str(job["id"]), "queued")
    return find_job(tx, tenant, str(job["id"]))


def list_jobs(
    tx: Tx,
    tenant: str,
    after: str | None = None,
    limit: int = 20,
    *,
    metadata: Mapping[str, str] | None = None,
    no_metadata: bool = False,
) -> Page:
    """Lists jobs, newest first; `metadata` selects jobs with all of these pairs, `no_metadata` those without any."""
    where: list[sa.ColumnElement[bool]] = [JOBS.c.tenant == tenant]
    if no_metadata:
        where.append(sa.or_(JOBS.c.metadata.is_(sa.null()), sa.cast(JOBS.c.metadata, sa.Text) == "null"))
    for key, value in (metadata or {}).items():
        where.append(JOBS.c.metadata[key].as_string() == value)
    return page(tx, JOBS, where, after=after, limit=limit)


def count_active(tx: Tx, tenant: str) -> int:
    """Counts the jobs that have not ended."""
    query = sa.select(sa.func.count()).select_from(JOBS)
    return int(tx.execute(query.where(JOBS.c.tenant == tenant, JOBS.c.status.not_in(FINAL_STATES))).scalar_one())


def starting_from(tx: Tx, tenant: str, model: str) -> str | None:
    """Returns a job that has not ended and starts from a fine-tuned model, or None."""
    starts = JOBS.c.settings["init_adapter"].as_string() == model
    query = sa.select(JOBS.c.id).where(JOBS.c.tenant == tenant, JOBS.c.status.not_in(FINAL_STATES), starts)
    return tx.execute(query.limit(1)).scalar_one_or_none()
