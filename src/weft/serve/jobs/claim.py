"""Who trains which job: workers take jobs for a while, and must keep saying that they still have them.

Problem: of the jobs that nobody holds, choose the next `room`, the first in the order

    priority, highest first;  then the tenant with the fewest tokens per weight;  then first come, first served.

A claim raises the job's fence and holds it until `lease_until` by the database's clock; `renew` moves that on. A job
whose lease ran out is anybody's again: its worker crashed, hangs, or cannot be heard, and whatever it still writes
bears an old fence and is refused. Every such loss counts in `attempts` until the job gets to a checkpoint again.

A job that kills its worker must not do so for ever, and those that trained beside it are not to blame. So after
`SUSPECT_AFTER` losses in a row jobs train among themselves, half of those that wait and at most `SUSPECTS_TOGETHER` at
a time; the next loss tells which of the groups it is in, and each of that group then trains alone until it gets to a
checkpoint. After `MAX_ATTEMPTS`, the last of them alone, a job has failed. All of this happens in the caller's one
transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from weft.plan.admit import QUANTUM_TOKENS, Share
from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import JOBS, TENANTS
from weft.serve.jobs.states import move, update_job
from weft.serve.records.events import add_event
from weft.serve.records.rows import Record, every

LEASE_S = 30.0
"""How long a worker may be silent before others take its jobs."""
MAX_ATTEMPTS = 4
"""Workers a job may lose in a row, without a checkpoint in between."""
SUSPECT_AFTER = 2
"""Losses in a row after which a job trains beside other suspects only; after one more it trains alone."""
SUSPECTS_TOGETHER = 8
"""With 32 jobs on a worker about as many groups to try as jobs to try alone when one of the groups fails."""
SHARE_WINDOW_S = 3600.0
"""What tenants have had is counted over jobs that are under way or ended at most so long ago: nobody pays for ever for
having used an idle machine."""
_COLUMNS = ("id", "tenant", "seq", "status", "priority", "fence", "worker", "lease_until", "attempts", "wanted")
_LOST = {
    "code": "worker_lost",
    "message": f"The worker was lost {MAX_ATTEMPTS} times in a row while it trained this job, the last time with this "
    "job alone. The job was given up so that others can go on.",
    "param": None,
}


def claim(tx: Tx, worker: str, base_model: str, room: int, *, lease_s: float = LEASE_S) -> list[Record]:
    """Takes up to `room` jobs for a worker and returns them as they are now, in the order in which they should start.

    Beyond that, a job may take the place of one of the worker's own with a lower priority. Jobs that were to be
    cancelled or paused when their worker was lost are, here and now.
    """
    at = now(tx)
    mine = every(tx, _active(base_model).where(JOBS.c.worker == worker, JOBS.c.lease_until > at))
    unheld = _free(base_model, at)
    if room < 1:
        unheld = unheld.where(_concerns_the_full(mine))
    # What another transaction holds is being claimed, renewed or asked for: waiting for it could be for each other.
    unheld = unheld.with_for_update(skip_locked=True, of=JOBS)
    free = [job for job in every(tx, unheld) if not _settle(tx, job)]
    if any(job["attempts"] >= SUSPECT_AFTER for job in mine):
        return []
    suspects = [job for job in free if _losses(job) >= SUSPECT_AFTER]
    if suspects:
        # While they wait, the worker takes no others, so that they are soon by themselves.
        chosen = [] if mine else _group(suspects)[: max(0, room)]
    else:
        chosen = _choose(free, mine, room, _shares(tx, {job["tenant"] for job in free}, at))
    return [_take(tx, job, worker, at + lease_s) for job in chosen]


def has_free(tx: Tx, base_model: str) -> bool:
    """Whether there is anything to claim; only reads."""
    return tx.execute(_free(base_model, now(tx)).limit(1)).first() is not None


def renew(tx: Tx, worker: str, *, lease_s: float = LEASE_S) -> list[Record]:
    """Holds on to all jobs the worker still has, and returns them as they are; what is not among them is lost.

    A lease that ran out is renewed as well if nobody has taken the job: its fence is still the worker's.
    """
    ours = sa.and_(JOBS.c.worker == worker, JOBS.c.status.in_(("queued", "running")))
    tx.execute(sa.update(JOBS).where(ours).values(lease_until=now(tx) + lease_s))
    return every(tx, sa.select(JOBS).where(ours).order_by(JOBS.c.seq))


def release(tx: Tx, tenant: str, id: str, *, fence: int, message: str | None = None, **columns: Any) -> None:
    """Gives a job back to the queue, which counts as no loss; Fenced if another worker has it."""
    job = tx.execute(sa.select(JOBS.c.status).where(JOBS.c.tenant == tenant, JOBS.c.id == id)).scalar_one_or_none()
    if job == "running":
        move(tx, tenant, id, "queued", fence=fence, message=message, **columns)
    else:
        update_job(tx, tenant, id, fence=fence, worker=None, lease_until=None, **columns)


def give_up(tx: Tx, worker: str) -> None:
    """Lets all leases of a worker that is about to crash run out at once, so that others need not wait."""
    ours = sa.and_(JOBS.c.worker == worker, JOBS.c.status.in_(("queued", "running")))
    tx.execute(sa.update(JOBS).where(ours).values(lease_until=0.0))


def _active(base_model: str) -> sa.Select[Any]:
    columns = [JOBS.c[name] for name in _COLUMNS]
    return sa.select(*columns).where(JOBS.c.status.in_(("queued", "running")), JOBS.c.model == base_model)


def _free(base_model: str, at: float) -> sa.Select[Any]:
    enabled = sa.select(TENANTS.c.id).where(TENANTS.c.is_disabled.is_(False))
    nobody = sa.or_(JOBS.c.worker.is_(None), JOBS.c.lease_until.is_(None), JOBS.c.lease_until <= at)
    return _active(base_model).where(nobody, JOBS.c.tenant.in_(enabled)).order_by(JOBS.c.seq)


def _concerns_the_full(mine: Sequence[Record]) -> sa.ColumnElement[bool]:
    """Which free jobs matter to a worker without room: a queue of thousands is not read and locked at every pulse.

    Those that outrank one of its own, those of lost workers, and those that need no place to be settled.
    """
    lowest = min((job["priority"] for job in mine), default=None)
    outranks = sa.false() if lowest is None else JOBS.c.priority > lowest
    is_suspect = JOBS.c.attempts >= SUSPECT_AFTER
    return sa.or_(outranks, is_suspect, JOBS.c.worker.is_not(None), JOBS.c.wanted.is_not(None))


def _losses(job: Record) -> int:
    """Workers a free job has lost in a row; one that was released has no worker, one that was lost still names it."""
    return int(job["attempts"]) + (job["worker"] is not None)


def _group(suspects: Sequence[Record]) -> list[Record]:
    """Which suspects are tried next: those with the fewest losses, as the most of them are not to blame."""
    fewest = min(_losses(job) for job in suspects)
    alike = [job for job in suspects if _losses(job) == fewest]
    return alike[: 1 if fewest > SUSPECT_AFTER else min(SUSPECTS_TOGETHER, (len(alike) + 1) // 2)]


def _settle(tx: Tx, job: Record) -> bool:
    """Does what needs no worker: ends a job that lost too many, cancels or pauses one that was to be; True if so."""
    changes: dict[str, Any] = {"fence": job["fence"], "attempts": _losses(job)}
    if job["wanted"] in ("cancel", "pause"):
        to = {"cancel": "cancelled", "pause": "paused"}[job["wanted"]]
    elif changes["attempts"] >= MAX_ATTEMPTS:
        to = "failed"
        changes |= {"error": _LOST, "message": str(_LOST["message"])}
    else:
        return False
    move(tx, job["tenant"], job["id"], to, **changes)
    # A worker that turns out to be alive after all finds itself fenced.
    tx.execute(sa.update(JOBS).where(JOBS.c.id == job["id"]).values(fence=job["fence"] + 1))
    return True


def _choose(free: list[Record], mine: Sequence[Record], room: int, shares: Mapping[str, Share]) -> list[Record]:
    """The jobs whose turn it is."""
    held: Counter[str] = Counter(job["tenant"] for job in mine)
    # Those that had to make room before are not counted again.
    lower = sorted(job["priority"] for job in mine)[max(0, -room) :]
    chosen: list[Record] = []

    def turn(job: Record) -> tuple[int, float, int]:
        share = shares[job["tenant"]]
        service = (share.served_tokens / QUANTUM_TOKENS + held[job["tenant"]]) / share.weight
        return (-job["priority"], service, job["seq"])

    while free:
        job = min(free, key=turn)
        # Only priority takes a place from a job that has one; among equals the others wait for their turn.
        if len(chosen) >= room and not (lower and lower.pop(0) < job["priority"]):
            break
        free.remove(job)
        held[job["tenant"]] += 1
        chosen.append(job)
    return chosen


def _shares(tx: Tx, tenants: set[str], at: float) -> dict[str, Share]:
    """What each tenant is entitled to and has had of late."""
    recent = sa.or_(JOBS.c.finished_at.is_(None), JOBS.c.finished_at > at - SHARE_WINDOW_S)
    served = sa.select(JOBS.c.tenant, sa.func.sum(JOBS.c.trained_tokens)).where(JOBS.c.tenant.in_(tenants), recent)
    tokens = {tenant: int(total) for tenant, total in tx.execute(served.group_by(JOBS.c.tenant))}
    weights = tx.execute(sa.select(TENANTS.c.id, TENANTS.c.weight).where(TENANTS.c.id.in_(tenants)))
    # A weight of nothing would divide by it; the smallest one waits for all others instead.
    return {tenant: Share(max(float(weight), 1e-9), tokens.get(tenant, 0)) for tenant, weight in weights}


def _take(tx: Tx, job: Record, worker: str, lease_until: float) -> Record:
    """Makes a free job, which this transaction holds, the worker's."""
    losses = _losses(job)
    changes = {"fence": job["fence"] + 1, "worker": worker, "lease_until": lease_until, "attempts": losses}
    one = sa.and_(JOBS.c.tenant == job["tenant"], JOBS.c.id == job["id"])
    tx.execute(sa.update(JOBS).where(one).values(changes))
    if job["worker"] is not None:
        text = f"The worker was lost; another takes over (loss {losses} in a row, {MAX_ATTEMPTS} end the job)"
        add_event(tx, job["tenant"], job["id"], "warn", text)
    return every(tx, sa.select(JOBS).where(one))[0]
