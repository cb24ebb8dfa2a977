"""Jobs: made once, listed newest first. Their status changes only through `weft.serve.jobs.states`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import JOBS
from weft.serve.jobs.states import FINAL, ask, find_job, move
from weft.serve.records.events import add_event
from weft.serve.records.rows import Basis, Page, Record, new_id, page

__all__ = [
    "ask", "count_active", "create_job", "get_job", "job_basis", "list_jobs", "newest_basis", "starting_from",
]  # fmt: skip

_ONE = sa.select(JOBS).where(JOBS.c.tenant == sa.bindparam("tenant"), JOBS.c.id == sa.bindparam("id"))
"""Made once: clients ask for it all the time, and making it takes longer than reading the row."""


def get_job(tx: Tx, tenant: str, id: str) -> Record:
    """A job of the tenant; NotFound if it has none of this id."""
    row = tx.execute(_ONE, {"tenant": tenant, "id": id}).mappings().first()
    return find_job(tx, tenant, id) if row is None else dict(row)


def job_basis(tenant: str, id: str) -> Basis:
    """The row that `get_job` finds."""
    return Basis("SELECT * FROM jobs WHERE tenant = ? AND id = ?", (tenant, id))


def newest_basis(tenant: str, limit: int) -> Basis:
    """The rows of the first page of `list_jobs`, and the one that tells whether there are more."""
    return Basis("SELECT * FROM jobs WHERE tenant = ? ORDER BY seq DESC LIMIT ?", (tenant, limit + 1))


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
) -> Record:
    """A new job in the queue; its files have been checked by the caller."""
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
    """Jobs, newest first; those with all of `metadata`, or those with none."""
    where: list[sa.ColumnElement[bool]] = [JOBS.c.tenant == tenant]
    if no_metadata:
        where.append(sa.or_(JOBS.c.metadata.is_(sa.null()), sa.cast(JOBS.c.metadata, sa.Text) == "null"))
    for key, value in (metadata or {}).items():
        where.append(JOBS.c.metadata[key].as_string() == value)
    return page(tx, JOBS, where, after=after, limit=limit)


def count_active(tx: Tx, tenant: str) -> int:
    """Jobs that have not ended."""
    query = sa.select(sa.func.count()).select_from(JOBS)
    return int(tx.execute(query.where(JOBS.c.tenant == tenant, JOBS.c.status.not_in(FINAL))).scalar_one())


def starting_from(tx: Tx, tenant: str, model: str) -> str | None:
    """A job that has not ended and goes on from a fine-tuned model, if there is one."""
    starts = JOBS.c.settings["init_adapter"].as_string() == model
    query = sa.select(JOBS.c.id).where(JOBS.c.tenant == tenant, JOBS.c.status.not_in(FINAL), starts)
    return tx.execute(query.limit(1)).scalar_one_or_none()
