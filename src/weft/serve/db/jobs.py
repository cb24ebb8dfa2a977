"""The rows of jobs and their events, the states of a job, and the only functions that change its state.

    validating_files ──> queued <──> running ──> succeeded
                           ^ |          | |
                           | v          | └────> failed
                           paused <─────┘
    Every state but the last three can also become cancelled or failed.

A move changes the row and appends the event about it in the caller's one transaction. A worker passes the fence it got
when it claimed the job: if another worker has claimed the job since, the move raises Fenced and nothing is written.
What a user requests (`request_change`) happens at once if no worker holds the job; otherwise it waits in `wanted` for
the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from weft.job_state import FINAL_STATES
from weft.serve.db.engine import DbRow, Page, Tx, WatchedRows, new_id, now, one, page, seq_after
from weft.serve.db.tables import EVENTS, JOBS
from weft.serve.errors import Fenced, NotFound, NotPossible

__all__ = [
    "count_active",
    "create_job",
    "get_job",
    "list_jobs",
    "request_change",
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
    return WatchedRows("SELECT * FROM jobs WHERE tenant = ? AND id = ?", (tenant, id))


def watched_newest_jobs(tenant: str, limit: int) -> WatchedRows:
    """Returns the rows to watch for the first page of `list_jobs`, and one more, which shows that there are more."""
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
    query = sa.select(sa.func.count()).select_from(JOBS)
    return int(tx.execute(query.where(JOBS.c.tenant == tenant, JOBS.c.status.not_in(FINAL_STATES))).scalar_one())


def starting_from(tx: Tx, tenant: str, model: str) -> str | None:
    """Returns a job that has not ended and starts from a fine-tuned model, or None."""
    starts = JOBS.c.settings["init_adapter"].as_string() == model
    query = sa.select(JOBS.c.id).where(JOBS.c.tenant == tenant, JOBS.c.status.not_in(FINAL_STATES), starts)
    return tx.execute(query.limit(1)).scalar_one_or_none()


STATES = ("validating_files", "queued", "running", "paused", *FINAL_STATES)
MOVES: dict[str, tuple[str, ...]] = {
    "validating_files": ("queued", "cancelled", "failed"),
    "queued": ("running", "paused", "cancelled", "failed"),
    "running": ("queued", "paused", "succeeded", "failed", "cancelled"),
    "paused": ("queued", "cancelled", "failed"),
    "succeeded": (),
    "failed": (),
    "cancelled": (),
}
"""Where a job may go from each state."""
MESSAGES = {
    "queued": "Files validated, moving job to queued state",
    "running": "Fine-tuning job started",
    "paused": "Fine-tuning job paused",
    "succeeded": "The job has successfully completed",
    "failed": "Fine-tuning job failed",
    "cancelled": "Fine-tuning job cancelled",
}


def find_job(tx: Tx, tenant: str, id: str, *, for_update: bool = False) -> DbRow:
    """Finds a job of the tenant; with `for_update` no one else can change it until the transaction ends."""
    query = sa.select(JOBS).where(JOBS.c.tenant == tenant, JOBS.c.id == id)
    missing = NotFound(f"Could not find fine tune: {id}", where="fine_tuning_job_id")
    return one(tx, query, missing, for_update=for_update)


def move(
    tx: Tx,
    tenant: str,
    id: str,
    to: str,
    *,
    fence: int | None = None,
    message: str | None = None,
    shut_out: bool = False,
    **columns: Any,
) -> DbRow:
    """Changes a job's status, sets `columns` as well, appends an event, and returns the job as it is now.

    Raises NotPossible if `MOVES` does not allow the change, and Fenced if `fence` is given and is not the job's. Every
    status but `running` ends the worker's lease; `paused` and final ones clear the user's pending request (`wanted`);
    final ones set `finished_at` and clear the checkpoint, whose file the caller or the daily clean-up deletes.
    `shut_out` increments the fence, so that the worker that held the job can no longer write to it.
    """
    job = find_job(tx, tenant, id, for_update=True)
    _check_fence(job, fence)
    if to not in MOVES[job["status"]]:
        raise NotPossible(f"Job {id} is {job['status']} and cannot become {to}.", where="status")
    changes: dict[str, Any] = {"status": to}
    if to != "running":
        changes |= {"worker": None, "lease_until": None, "estimated_finish": None}
    if to in (*FINAL_STATES, "paused"):
        changes["wanted"] = None
    if to in FINAL_STATES:
        changes |= {"finished_at": int(now(tx)), "saved_step": None, "saved_blob": None}
    if shut_out:
        changes["fence"] = job["fence"] + 1
    changes |= columns
    tx.execute(sa.update(JOBS).where(JOBS.c.tenant == tenant, JOBS.c.id == id).values(changes))
    text = message or _message(job["status"], to)
    add_event(tx, tenant, id, "error" if to == "failed" else "info", text)
    return {**job, **changes}


def update_job(tx: Tx, tenant: str, id: str, *, fence: int, **columns: Any) -> None:
    """Sets columns of a job without a move; raises Fenced unless the worker with this fence still holds it."""
    query = sa.update(JOBS).where(JOBS.c.tenant == tenant, JOBS.c.id == id, JOBS.c.fence == fence)
    if tx.execute(query.values(columns)).rowcount == 0:
        _check_fence(find_job(tx, tenant, id), fence)


def request_change(tx: Tx, tenant: str, id: str, wish: str) -> DbRow:
    """Cancels, pauses or resumes a job for its user, or notes the wish for the worker; repeating it is harmless."""
    job = find_job(tx, tenant, id, for_update=True)
    status = job["status"]
    if status == {"cancel": "cancelled", "pause": "paused"}.get(wish):
        return job
    if status in FINAL_STATES:
        raise NotPossible(f"Job {id} is {status}; it is too late to {wish} it.", where="fine_tuning_job_id")
    if job["wanted"] == "cancel" and wish != "cancel":
        raise NotPossible(f"Job {id} is being cancelled; it is too late to {wish} it.", where="fine_tuning_job_id")
    if wish == "resume" and status != "paused":
        # Nothing to resume, unless a pause is requested and has not happened yet.
        return _want(tx, job, None) if job["wanted"] == "pause" else job
    if wish == "pause" and status == "validating_files":
        raise NotPossible(f"Job {id} is {status}; pause it when it is queued.", where="fine_tuning_job_id")
    if job["worker"] and (job["lease_until"] or 0) > now(tx):
        return _want(tx, job, wish)
    # No live worker holds the job; raising the fence keeps that worker from writing again.
    to, text = {
        "cancel": ("cancelled", None),
        "pause": ("paused", None),
        "resume": ("queued", "Fine-tuning job resumed, moving job to queued state"),
    }[wish]
    return move(tx, tenant, id, to, message=text, shut_out=job["worker"] is not None)


def _want(tx: Tx, job: DbRow, wish: str | None) -> DbRow:
    if job["wanted"] != wish:
        tx.execute(sa.update(JOBS).where(JOBS.c.id == job["id"]).values(wanted=wish))
    return {**job, "wanted": wish}


def _check_fence(job: DbRow, fence: int | None) -> None:
    if fence is not None and job["fence"] != fence:
        raise Fenced(f"Job {job['id']} was taken over: its fence is {job['fence']}, not {fence}.")


def _message(before: str, to: str) -> str:
    if to == "queued" and before == "running":
        return "The worker stops; the job goes back to the queue and will go on where it was"
    if to == "running" and before == "paused":
        return "Fine-tuning job resumed"
    return MESSAGES[to]


_SINCE = (
    sa.select(EVENTS)
    .where(
        EVENTS.c.tenant == sa.bindparam("tenant"),
        EVENTS.c.job == sa.bindparam("job"),
        EVENTS.c.seq > sa.bindparam("seq"),
    )
    .order_by(EVENTS.c.seq)
    .limit(sa.bindparam("limit"))
)
"""The query is made once because every stream runs it all the time."""


def add_event(tx: Tx, tenant: str, job: str, level: str, message: str, type: str = "message", data: Any = None) -> str:
    """Appends an event to a job and returns its id; levels are info, warn and error, types message and metrics."""
    event = event_row(tenant, job, now(tx), level, message, type, data)
    tx.execute(sa.insert(EVENTS).values(event))
    return str(event["id"])


def event_row(tenant: str, job: str, at: float, level: str, message: str, type: str, data: Any) -> DbRow:
    return {
        "id": new_id("ftevent-"),
        "tenant": tenant,
        "job": job,
        "created_at": int(at),
        "level": level,
        "type": type,
        "message": message,
        "data": data,
    }


def list_events(tx: Tx, tenant: str, job: str, after: str | None = None, limit: int = 20) -> Page:
    mine = sa.and_(EVENTS.c.tenant == tenant, EVENTS.c.job == job)
    return page(tx, EVENTS, [mine], after=after, limit=limit)


def events_since(tx: Tx, tenant: str, job: str, seq: int, limit: int = 500) -> list[DbRow]:
    """Returns the events of a job after number `seq`, oldest first: those that a stream sends next."""
    values = {"tenant": tenant, "job": job, "seq": seq, "limit": limit}
    return [dict(row) for row in tx.execute(_SINCE, values).mappings()]


def seq_of(tx: Tx, tenant: str, job: str, id: str) -> int:
    return seq_after(tx, EVENTS, id, EVENTS.c.tenant == tenant, EVENTS.c.job == job)
