"""Decides which worker trains which job: a worker leases a job for a while and must keep renewing the lease.

Problem: of the jobs that nobody holds, choose the next `num_places` in this order:

    highest priority first;  then the tenant with the fewest tokens per weight;  then first come, first served.

A claim raises the job's fence and holds the job until `lease_until` by the database's clock; `renew` extends that. A
job whose lease has run out may be claimed again: its worker crashed, hangs, or has lost its connection, and whatever
that worker still writes carries an old fence and is refused. Every such loss counts in `attempts` until the job reaches
a checkpoint again.

Where several workers are alive, each leaves to the others what is theirs (`sharing`).

A job that kills its worker must not do so for ever, and the jobs that trained beside it are not to blame. So after
`SUSPECT_AFTER` losses in a row, jobs are suspects and train among themselves: half of those that wait and at most
`SUSPECTS_TOGETHER` at a time. The next loss tells which group the culprit is in, and each job of that group then trains
alone until it reaches a checkpoint. After `MAX_ATTEMPTS` losses, the last of them alone, a job fails. All of this
happens in the caller's one transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from weft.plan.admit import QUANTUM_TOKENS, Share
from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import JOBS, TENANTS
from weft.serve.jobs.sharing import LENGTH, fair_room, is_for_another, loads_of
from weft.serve.jobs.states import move, update_job
from weft.serve.records.events import add_event
from weft.serve.records.rows import DbRow, every

LEASE_S = 30.0
"""How long a worker may be silent before others take its jobs."""
MAX_ATTEMPTS = 4
"""How many workers a job may lose in a row, without a checkpoint in between."""
SUSPECT_AFTER = 2
"""After so many losses in a row a job trains only beside other suspects; after one more it trains alone."""
SUSPECTS_TOGETHER = 8
"""With 32 jobs on a worker this makes about as many groups as there are jobs to try alone once a group fails."""
SHARE_WINDOW_S = 3600.0
"""A tenant's share counts the jobs that are under way or ended in the last so many seconds: nobody pays for ever for
having used an idle machine."""
_COLUMNS = ("id", "tenant", "seq", "status", "priority", "fence", "worker", "lease_until", "attempts", "wanted")
_LOST = {
    "code": "worker_lost",
    "message": f"The worker was lost {MAX_ATTEMPTS} times in a row while it trained this job, the last time with this "
    "job alone. The job was given up so that others can go on.",
    "param": None,
}


def claim_jobs(tx: Tx, worker: str, base_model: str, num_places: int, *, lease_s: float = LEASE_S) -> list[DbRow]:
    """Claims up to `num_places` jobs for a worker and returns them as they are now, in the order in which they start.

    Beyond that, a job may take the place of one of the worker's own jobs that has a lower priority. Jobs that were to
    be cancelled or paused when their worker was lost are cancelled or paused here.
    """
    at = now(tx)
    mine = every(tx, _active(base_model).where(JOBS.c.worker == worker, JOBS.c.lease_until > at))
    unheld = _free(base_model, at)
    if num_places < 1:
        unheld = unheld.where(_concerns_the_full(mine))
    # A row that another transaction holds is being claimed, renewed or changed; waiting for it could be a deadlock.
    unheld = unheld.with_for_update(skip_locked=True, of=JOBS)
    free = [job for job in every(tx, unheld) if not _settle(tx, job)]
    if not free or any(job["attempts"] >= SUSPECT_AFTER for job in mine):
        return []
    load, others = loads_of(tx, worker, base_model)
    free = [job for job in free if not is_for_another(job, load, others)]
    suspects = [job for job in free if _losses(job) >= SUSPECT_AFTER]
    if suspects:
        # While suspects wait, the worker claims no other jobs, so that they can soon train by themselves.
        chosen = [] if mine else _group(suspects)[: max(0, num_places)]
    else:
        room = fair_room(load, others, num_places, free)
        chosen = _choose(free, mine, room, _shares(tx, {job["tenant"] for job in free}, at))
    return [_take(tx, job, worker, at + lease_s) for job in chosen]


def has_free(tx: Tx, base_model: str) -> bool:
    """Whether there is a job to claim; this only reads."""
    return tx.execute(_free(base_model, now(tx)).limit(1)).first() is not None


def renew(tx: Tx, worker: str, *, lease_s: float = LEASE_S) -> list[DbRow]:
    """Renews the leases of all jobs the worker still has and returns their rows; a job not among them is lost.

    A lease that has run out is renewed as well if nobody has taken the job, because its fence is still the worker's.
    """
    ours = sa.and_(JOBS.c.worker == worker, JOBS.c.status.in_(("queued", "running")))
    tx.execute(sa.update(JOBS).where(ours).values(lease_until=now(tx) + lease_s))
    return every(tx, sa.select(JOBS).where(ours).order_by(JOBS.c.seq))


def release(tx: Tx, tenant: str, id: str, *, fence: int, message: str | None = None, **columns: Any) -> None:
    """Returns a job to the queue, which does not count as a loss; raises Fenced if another worker has it."""
    job = tx.execute(sa.select(JOBS.c.status).where(JOBS.c.tenant == tenant, JOBS.c.id == id)).scalar_one_or_none()
    if job == "running":
        move(tx, tenant, id, "queued", fence=fence, message=message, **columns)
    else:
        update_job(tx, tenant, id, fence=fence, worker=None, lease_until=None, **columns)


def give_up(tx: Tx, worker: str) -> None:
    """Ends all leases of a worker that is about to crash, so that others need not wait for them."""
    ours = sa.and_(JOBS.c.worker == worker, JOBS.c.status.in_(("queued", "running")))
    tx.execute(sa.update(JOBS).where(ours).values(lease_until=0.0))


def _active(base_model: str) -> sa.Select[Any]:
    columns = [JOBS.c[name] for name in _COLUMNS]
    is_active = sa.and_(JOBS.c.status.in_(("queued", "running")), JOBS.c.model == base_model)
    return sa.select(*columns, JOBS.c.started_at, JOBS.c.min_job_bytes, LENGTH).where(is_active)


def _free(base_model: str, at: float) -> sa.Select[Any]:
    enabled = sa.select(TENANTS.c.id).where(TENANTS.c.is_disabled.is_(False))
    nobody = sa.or_(JOBS.c.worker.is_(None), JOBS.c.lease_until.is_(None), JOBS.c.lease_until <= at)
    return _active(base_model).where(nobody, JOBS.c.tenant.in_(enabled)).order_by(JOBS.c.seq)


def _concerns_the_full(mine: Sequence[DbRow]) -> sa.ColumnElement[bool]:
    """Selects the free jobs that matter to a full worker, so that it does not lock a queue of thousands each time.

    They are the jobs that outrank one of its own, those of lost workers, and those to cancel or pause.
    """
    lowest = min((job["priority"] for job in mine), default=None)
    outranks = sa.false() if lowest is None else JOBS.c.priority > lowest
    is_suspect = JOBS.c.attempts >= SUSPECT_AFTER
    return sa.or_(outranks, is_suspect, JOBS.c.worker.is_not(None), JOBS.c.wanted.is_not(None))


def _losses(job: DbRow) -> int:
    """Counts the workers a free job lost in a row; a job that was lost, and not released, still names the last one."""
    return int(job["attempts"]) + (job["worker"] is not None)


def _group(suspects: Sequence[DbRow]) -> list[DbRow]:
    """Chooses the suspects to try next: those with the fewest losses, since most of them are not to blame."""
    fewest = min(_losses(job) for job in suspects)
    alike = [job for job in suspects if _losses(job) == fewest]
    return alike[: 1 if fewest > SUSPECT_AFTER else min(SUSPECTS_TOGETHER, (len(alike) + 1) // 2)]


def _settle(tx: Tx, job: DbRow) -> bool:
    """Ends a job that lost too many workers, or cancels or pauses it as its user wanted; returns whether it did."""
    changes: dict[str, Any] = {"fence": job["fence"], "attempts": _losses(job)}
    if job["wanted"] in ("cancel", "pause"):
        to = {"cancel": "cancelled", "pause": "paused"}[job["wanted"]]
    elif changes["attempts"] >= MAX_ATTEMPTS:
        to = "failed"
        changes |= {"error": _LOST, "message": str(_LOST["message"])}
    else:
        return False
    move(tx, job["tenant"], job["id"], to, **changes)
    # A worker that turns out to be alive after all finds that it is fenced off.
    tx.execute(sa.update(JOBS).where(JOBS.c.id == job["id"]).values(fence=job["fence"] + 1))
    return True


def _choose(free: list[DbRow], mine: Sequence[DbRow], num_places: int, shares: Mapping[str, Share]) -> list[DbRow]:
    """Chooses the jobs whose turn it is."""
    held: Counter[str] = Counter(job["tenant"] for job in mine)
    # Jobs that have already lost their place are not counted again.
    lower = sorted(job["priority"] for job in mine)[max(0, -num_places) :]
    chosen: list[DbRow] = []

    def turn(job: DbRow) -> tuple[int, float, int]:
        share = shares[job["tenant"]]
        service = (share.served_tokens / QUANTUM_TOKENS + held[job["tenant"]]) / share.weight
        return (-job["priority"], service, job["seq"])

    while free:
        job = min(free, key=turn)
        # A job loses its place only to one of higher priority; among equals the others wait for their turn.
        if len(chosen) >= num_places and not (lower and lower.pop(0) < job["priority"]):
            break
        free.remove(job)
        held[job["tenant"]] += 1
        chosen.append(job)
    return chosen


def _shares(tx: Tx, tenants: set[str], at: float) -> dict[str, Share]:
    """Returns each tenant's weight and the tokens it was served lately."""
    recent = sa.or_(JOBS.c.finished_at.is_(None), JOBS.c.finished_at > at - SHARE_WINDOW_S)
    served = sa.select(JOBS.c.tenant, sa.func.sum(JOBS.c.trained_tokens)).where(JOBS.c.tenant.in_(tenants), recent)
    tokens = {tenant: int(total) for tenant, total in tx.execute(served.group_by(JOBS.c.tenant))}
    weights = tx.execute(sa.select(TENANTS.c.id, TENANTS.c.weight).where(TENANTS.c.id.in_(tenants)))
    # A weight of zero cannot divide; the smallest weight waits for all others instead.
    return {tenant: Share(max(float(weight), 1e-9), tokens.get(tenant, 0)) for tenant, weight in weights}


def _take(tx: Tx, job: DbRow, worker: str, lease_until: float) -> DbRow:
    """Gives a free job, whose row this transaction holds, to the worker."""
    losses = _losses(job)
    changes = {"fence": job["fence"] + 1, "worker": worker, "lease_until": lease_until, "attempts": losses}
    one = sa.and_(JOBS.c.tenant == job["tenant"], JOBS.c.id == job["id"])
    tx.execute(sa.update(JOBS).where(one).values(changes))
    if job["worker"] is not None:
        text = f"The worker was lost; another takes over (loss {losses} in a row, {MAX_ATTEMPTS} end the job)"
        add_event(tx, job["tenant"], job["id"], "warn", text)
    return every(tx, sa.select(JOBS).where(one))[0]
