"""The states of a job, and the only functions that change them.

    validating_files ──> queued <──> running ──> succeeded
                           ^ |          | |
                           | v          | └────> failed
                           paused <─────┘
    Every state but the last three can also become cancelled or failed.

A move changes the row and appends the event about it in the caller's one transaction. A worker passes the fence it got
when it claimed the job: if another worker has claimed the job since, the move raises Fenced and nothing is written.
What a user asks for (`ask`) happens at once if no worker holds the job; otherwise it waits in `wanted` for the worker.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from weft.job_state import FINAL_STATES
from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import JOBS
from weft.serve.errors import Fenced, NotFound, NotPossible
from weft.serve.records.events import add_event
from weft.serve.records.rows import DbRow, first

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
    """Finds a job of the tenant; with `for_update` nobody else can change it until the transaction ends."""
    query = sa.select(JOBS).where(JOBS.c.tenant == tenant, JOBS.c.id == id)
    job = first(tx, query.with_for_update() if for_update else query)
    if job is None:
        raise NotFound(f"Could not find fine tune: {id}", where="fine_tuning_job_id")
    return job


def move(
    tx: Tx,
    tenant: str,
    id: str,
    to: str,
    *,
    fence: int | None = None,
    message: str | None = None,
    level: str | None = None,
    data: Any = None,
    shut_out: bool = False,
    **columns: Any,
) -> DbRow:
    """Changes a job's status, sets `columns` as well, appends an event, and returns the job as it is now.

    An illegal move raises NotPossible. A move into a final state sets `finished_at` and no longer names a checkpoint in
    the file store, which the caller or the daily clean-up deletes; a move out of `running` ends the worker's lease; a
    move to `paused` or a final state settles what the user wanted. `shut_out` raises the fence, so
    that the worker that held the job can write no more about it.
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
    add_event(tx, tenant, id, level or ("error" if to == "failed" else "info"), text, data=data)
    return {**job, **changes}


def update_job(tx: Tx, tenant: str, id: str, *, fence: int, **columns: Any) -> None:
    """Sets columns of a job without a move; raises Fenced unless the worker with this fence still holds it."""
    query = sa.update(JOBS).where(JOBS.c.tenant == tenant, JOBS.c.id == id, JOBS.c.fence == fence)
    if tx.execute(query.values(columns)).rowcount == 0:
        _check_fence(find_job(tx, tenant, id), fence)


def check_fence(tx: Tx, tenant: str, id: str, fence: int) -> DbRow:
    """Locks a job and returns it; raises Fenced unless the worker with this fence still holds it."""
    job = find_job(tx, tenant, id, for_update=True)
    _check_fence(job, fence)
    return job


def ask(tx: Tx, tenant: str, id: str, wish: str) -> DbRow:
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
        # Nothing to resume, unless a pause was asked for and has not happened yet.
        return _want(tx, job, None) if job["wanted"] == "pause" else job
    if wish == "pause" and status == "validating_files":
        raise NotPossible(f"Job {id} is {status}; pause it when it is queued.", where="fine_tuning_job_id")
    if job["worker"] and (job["lease_until"] or 0) > now(tx):
        return _want(tx, job, wish)
    # Nobody holds the job, or a dead worker does; raising the fence keeps that worker from writing again.
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
