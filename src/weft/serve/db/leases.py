"""Decides which worker trains which job: a worker leases a job for a while and must keep renewing the lease.

Problem: of the jobs that no worker holds, choose the next `num_seats` in this order:

    highest priority first;  then the tenant with the fewest seats per weight;  then the one with the fewest tokens per
    weight;  then first come, first served.

A claim raises the job's fence and holds the job until `lease_until` by the database's clock; `renew` extends that. A
job whose lease has run out may be claimed again: its worker crashed, hangs, or has lost its connection, and whatever
that worker still writes carries an old fence and is refused. Every such loss counts in `attempts` until the job reaches
a checkpoint again. Where that clock is set back, leases are shortened; where it is set forward, workers wait for each
other's renewals before they claim.

Where several workers are alive, each leaves to the others what is theirs (`sharing`). Where all seats are taken and a
tenant with fewer of them per weight waits, jobs of the others make way at their next checkpoint (`GiveBack`).

A job that kills its worker must not do so for ever, and the jobs that trained beside it are not to blame. So after
`SUSPECT_AFTER` losses in a row, jobs are suspects and train among themselves: half of those that wait and at most
`SUSPECTS_TOGETHER` at a time. The next loss shows which group the culprit is in, and each job of that group then trains
alone until it reaches a checkpoint. After `MAX_ATTEMPTS` losses, the last of them alone, a job fails. All of this
happens in the caller's one transaction.

A job that is given back, so that other workers or tenants get their part, is saved at its next step boundary, goes back
to the queue and loses nothing. Numbers must have been unequal for `STABLE_S`, and after that a worker keeps its other
jobs for `REST_S`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from weft.plan.admit import EVALUATED_PER_TRAINED, QUANTUM_TOKENS, Share
from weft.serve.db.engine import DbRow, Tx, every, now
from weft.serve.db.jobs import add_event, move, update_job
from weft.serve.db.tables import JOBS, TENANTS, USAGE, WORKERS
from weft.serve.db.usage import EVALUATED
from weft.serve.db.workers import (
    LENGTH,
    WorkerLoad,
    all_workers,
    fair_room,
    is_for_another,
    is_lost,
    loads_of,
    num_to_give_back,
    remove_worker,
)
from weft.serve.errors import NotFound, NotPossible

LEASE_S = 30.0
"""How long a worker may be silent before others take its jobs."""
MAX_ATTEMPTS = 4
"""How many workers a job may lose in a row, without a checkpoint in between."""
SUSPECT_AFTER = 2
"""After so many losses in a row a job trains only beside other suspects; after one more it trains alone."""
SUSPECTS_TOGETHER = 8
"""With 32 jobs on a worker this makes about as many groups as there are jobs to try alone once a group fails."""
SHARE_WINDOW_S = 3600.0
"""A tenant's share counts the jobs that are under way or ended in the last so many seconds, and evaluations of
that time: having used an idle machine does not count against a tenant for ever."""
_COLUMNS = ("id", "tenant", "seq", "status", "priority", "fence", "worker", "lease_until", "attempts", "wanted")
_LOST = {
    "code": "worker_lost",
    "message": f"The worker was lost {MAX_ATTEMPTS} times in a row while it trained this job, the last time with this "
    "job alone. The job was given up so that others can go on.",
    "param": None,
}


def claim_jobs(tx: Tx, worker: str, base_model: str, num_seats: int, *, lease_s: float = LEASE_S) -> list[DbRow]:
    """Claims up to `num_seats` jobs for a worker and returns them as they are now, in the order in which they start.
    Beyond that, a job may take the seat of one of the worker's own jobs that has a lower priority. Jobs that were to be
    cancelled or paused when their worker was lost are cancelled or paused here."""
    at = now(tx)
    mine = every(tx, _active(base_model).where(JOBS.c.worker == worker, JOBS.c.lease_until > at))
    unheld = free_jobs(base_model, at)
    if num_seats < 1:
        unheld = unheld.where(_concerns_the_full(mine))
    # A row that another transaction holds is being claimed, renewed or changed; waiting for it could be a deadlock.
    unheld = unheld.with_for_update(skip_locked=True, of=JOBS)
    free = [job for job in every(tx, unheld) if not _end_or_pause(tx, job)]
    if not free or any(job["attempts"] >= SUSPECT_AFTER for job in mine):
        return []
    load, others = loads_of(tx, worker, base_model)
    free = [job for job in free if not is_for_another(job, load, others)]
    suspects = [job for job in free if _losses(job) >= SUSPECT_AFTER]
    if suspects:
        # While suspects wait, the worker claims no other jobs, so that they can soon train by themselves.
        chosen = [] if mine else _group(suspects)[: max(0, num_seats)]
    else:
        room = fair_room(load, others, num_seats, free)
        shares = shares_of(tx, {job["tenant"] for job in free}, at)
        chosen = _choose(free, mine, room, shares, held_by_tenant(tx, base_model, at))
    return [_take(tx, job, worker, at + lease_s) for job in chosen]


def has_free(tx: Tx, base_model: str) -> bool:
    """Whether there is a job to claim; this only reads."""
    return tx.execute(free_jobs(base_model, now(tx)).limit(1)).first() is not None


def renew(tx: Tx, worker: str, *, lease_s: float = LEASE_S) -> list[DbRow]:
    """Renews the leases of all jobs the worker still has and returns their rows; a job not among them is lost. A lease
    that has run out is renewed as well if no worker has taken the job, because its fence is still the worker's."""
    ours = sa.and_(JOBS.c.worker == worker, JOBS.c.status.in_(("queued", "running")))
    tx.execute(sa.update(JOBS).where(ours).values(lease_until=now(tx) + lease_s))
    return every(tx, sa.select(JOBS).where(ours).order_by(JOBS.c.seq))


def shorten_leases(tx: Tx) -> None:
    """Ends no lease, but lets none last longer than its worker's leases do: after the database's clock was set back,
    those of a worker that died before would last until it catches up, and the worker would look alive as long."""
    at = now(tx)
    own = sa.select(WORKERS.c.lease_s).where(WORKERS.c.id == JOBS.c.worker).scalar_subquery()
    longest = at + sa.func.coalesce(own, LEASE_S)
    held = sa.and_(JOBS.c.status.in_(("queued", "running")), JOBS.c.worker.is_not(None))
    tx.execute(sa.update(JOBS).where(held, JOBS.c.lease_until > longest).values(lease_until=longest))
    tx.execute(sa.update(WORKERS).where(WORKERS.c.seen_at > at).values(seen_at=at))


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


def free_jobs(base_model: str, at: float) -> sa.Select[Any]:
    enabled = sa.select(TENANTS.c.id).where(TENANTS.c.is_disabled.is_(False))
    unheld = sa.or_(JOBS.c.worker.is_(None), JOBS.c.lease_until.is_(None), JOBS.c.lease_until <= at)
    return _active(base_model).where(unheld, JOBS.c.tenant.in_(enabled)).order_by(JOBS.c.seq)


def _concerns_the_full(mine: Sequence[DbRow]) -> sa.ColumnElement[bool]:
    """Selects the free jobs that matter to a full worker, so that it does not lock a queue of thousands each time. They
    are the jobs that outrank one of its own, those of lost workers, and those to cancel or pause."""
    lowest = min((job["priority"] for job in mine), default=None)
    outranks = sa.false() if lowest is None else JOBS.c.priority > lowest
    is_suspect = JOBS.c.attempts >= SUSPECT_AFTER
    return sa.or_(outranks, is_suspect, JOBS.c.worker.is_not(None), JOBS.c.wanted.is_not(None))


def _losses(job: DbRow) -> int:
    return int(job["attempts"]) + (job["worker"] is not None)


def _group(suspects: Sequence[DbRow]) -> list[DbRow]:
    """Chooses the suspects to try next: those with the fewest losses, since most of them are not to blame."""
    fewest = min(_losses(job) for job in suspects)
    alike = [job for job in suspects if _losses(job) == fewest]
    return alike[: 1 if fewest > SUSPECT_AFTER else min(SUSPECTS_TOGETHER, (len(alike) + 1) // 2)]


def _end_or_pause(tx: Tx, job: DbRow) -> bool:
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


def _choose(
    free: list[DbRow], mine: Sequence[DbRow], num_seats: int, shares: Mapping[str, Share], held: Counter[str]
) -> list[DbRow]:
    """Chooses the jobs whose turn it is; `held` counts the seats of each tenant on all workers."""
    # Jobs that have already lost their seat are not counted again.
    lower = sorted(job["priority"] for job in mine)[max(0, -num_seats) :]
    chosen: list[DbRow] = []

    def turn(job: DbRow) -> tuple[int, float, float, int]:
        share = shares[job["tenant"]]
        seats, tokens = held[job["tenant"]] / share.weight, share.served_tokens / share.weight
        return (-job["priority"], seats, tokens, job["seq"])

    while free:
        job = min(free, key=turn)
        # A job loses its seat only to one of higher priority; among equals the others wait for their turn.
        if len(chosen) >= num_seats and not (lower and lower.pop(0) < job["priority"]):
            break
        free.remove(job)
        held[job["tenant"]] += 1
        chosen.append(job)
    return chosen


def held_by_tenant(tx: Tx, base_model: str, at: float) -> Counter[str]:
    held = sa.select(JOBS.c.tenant, sa.func.count()).where(
        JOBS.c.status.in_(("queued", "running")), JOBS.c.model == base_model, JOBS.c.lease_until > at
    )
    return Counter({str(tenant): int(number) for tenant, number in tx.execute(held.group_by(JOBS.c.tenant))})


def shares_of(tx: Tx, tenants: set[str], at: float) -> dict[str, Share]:
    """Returns each tenant's weight and the tokens it was served lately."""
    recent = sa.or_(JOBS.c.finished_at.is_(None), JOBS.c.finished_at > at - SHARE_WINDOW_S)
    served = sa.select(JOBS.c.tenant, sa.func.sum(JOBS.c.trained_tokens)).where(JOBS.c.tenant.in_(tenants), recent)
    tokens = Counter({tenant: int(total) for tenant, total in tx.execute(served.group_by(JOBS.c.tenant))})
    evaluated = sa.select(USAGE.c.tenant, sa.func.sum(USAGE.c.tokens)).where(
        USAGE.c.tenant.in_(tenants), USAGE.c.kind == EVALUATED, USAGE.c.created_at > at - SHARE_WINDOW_S
    )
    for tenant, total in tx.execute(evaluated.group_by(USAGE.c.tenant)):
        tokens[tenant] += int(total) // EVALUATED_PER_TRAINED
    weights = tx.execute(sa.select(TENANTS.c.id, TENANTS.c.weight).where(TENANTS.c.id.in_(tenants)))
    # A weight of zero cannot divide; the smallest weight waits for all others instead.
    return {tenant: Share(max(float(weight), 1e-9), tokens[tenant]) for tenant, weight in weights}


def _take(tx: Tx, job: DbRow, worker: str, lease_until: float) -> DbRow:
    losses = _losses(job)
    changes = {"fence": job["fence"] + 1, "worker": worker, "lease_until": lease_until, "attempts": losses}
    one = sa.and_(JOBS.c.tenant == job["tenant"], JOBS.c.id == job["id"])
    tx.execute(sa.update(JOBS).where(one).values(changes))
    if job["worker"] is not None:
        text = f"The worker was lost; another takes over (loss {losses} in a row, {MAX_ATTEMPTS} end the job)"
        add_event(tx, job["tenant"], job["id"], "warn", text)
    return every(tx, sa.select(JOBS).where(one))[0]


WISHES = {"drain": "drain", "undrain": None, "remove": "remove"}
"""Requests to a worker, and the value of `wanted` in its row for each."""
SHORTEST_END = 6
"""The fewest letters of the end of a worker's id that stand for the worker."""


def steer_workers(tx: Tx, target: str, wish: str) -> list[DbRow]:
    """Drains, undrains or removes a worker, or all workers of a machine; returns their rows as they were. Repeating it
    is harmless. It raises NotFound if there is no such worker or machine."""
    found = find_workers(tx, target)
    at = now(tx)
    lost = [row for row in found if is_lost(row, at)]
    if wish != "remove" and len(lost) == len(found):
        raise NotPossible(f"{target} is lost: it has nothing to {wish}, but it can be removed.", where="worker")
    for row in found:
        if row in lost and wish == "remove":
            give_up(tx, row["id"])
            remove_worker(tx, row["id"])
        elif row not in lost and row["wanted"] != "remove":
            tx.execute(sa.update(WORKERS).where(WORKERS.c.id == row["id"]).values(wanted=WISHES[wish]))
    return found


def find_workers(tx: Tx, target: str) -> list[DbRow]:
    """Finds the worker of this id, or of an id that ends so, or all workers of the machine of this name."""
    rows = all_workers(tx)
    named = [row for row in rows if target in (row["id"], row["machine"])]
    if not named and len(target) >= SHORTEST_END:
        named = [row for row in rows if row["id"].endswith(target)]
    if not named:
        known = sorted({row["machine"] for row in rows if row["machine"]} | {row["id"] for row in rows})
        raise NotFound(
            f"there is no worker or machine {target!r}; there are {', '.join(known) or 'none'}.", where="worker"
        )
    return named


STABLE_S = 10.0
"""How long the numbers must have been unequal: a worker that has just started may still be claiming."""
WORTH_S = 60.0
"""The least time that a job must still have to go, by its estimate."""
REST_S = 60.0
"""How long a worker that has given jobs back keeps the others."""
LOOK_S = 2.0


class GiveBack(ABC):
    """What one worker remembers of jobs that it should give back. All times are by the database's clock."""

    def __init__(self) -> None:
        self._unequal_since: float | None = None
        self._look_at = 0.0

    def choose(self, tx: Tx, worker: str, base_model: str, jobs: Iterable[DbRow], at: float) -> list[str]:
        """Returns the ids of those of the worker's jobs that it should give back now."""
        # A clock that was set back is not waited for.
        if at < self._look_at <= at + REST_S:
            return []
        self._look_at = at + LOOK_S
        chosen = self._chosen(tx, worker, base_model, [job for job in jobs if _is_worth_moving(job, at)], at)
        if chosen is None:
            self._unequal_since = None
            return []
        self._unequal_since = at if self._unequal_since is None else min(at, self._unequal_since)
        return [] if at - self._unequal_since < STABLE_S else [job["id"] for job in chosen]

    @abstractmethod
    def _chosen(self, tx: Tx, worker: str, base_model: str, movable: list[DbRow], at: float) -> list[DbRow] | None:
        """Returns the jobs to give back if this lasts; None: all is as it should be."""

    def rest(self, at: float) -> None:
        self._unequal_since, self._look_at = None, at + REST_S


class Rebalance(GiveBack):
    """Gives jobs to workers with empty seats when nothing waits."""

    def _chosen(self, tx: Tx, worker: str, base_model: str, movable: list[DbRow], at: float) -> list[DbRow] | None:
        number = 0 if has_free(tx, base_model) else num_to_give_back(*loads_of(tx, worker, base_model))
        return sorted(movable, key=lambda job: (-job["estimated_finish"], job["seq"]))[:number] if number else None


class SeatShares(GiveBack):
    """Has jobs make way on a full worker for a tenant that has fewer seats per weight and waits.

    A seat changes hands only if its new tenant then has no more seats per weight than the old one keeps, so it does not
    change back. With more tenants than seats, one without any takes a seat from one that was served a quantum of tokens
    per weight more. A job makes way only for one of at least its priority.
    """

    def _chosen(self, tx: Tx, worker: str, base_model: str, movable: list[DbRow], at: float) -> list[DbRow] | None:
        load, _ = loads_of(tx, worker, base_model)
        if load.max_jobs is None or load.num_held < load.max_jobs:
            return None
        waiting = _waiting(tx, base_model, load, at)
        if not waiting:
            return None
        held = held_by_tenant(tx, base_model, at)
        shares = shares_of(tx, {*held, *(tenant for tenant, _ in waiting)}, at)
        # Of equal priority the job that came last makes way first.
        movable = sorted(movable, key=lambda job: (job["priority"], -job["seq"]))
        chosen: list[DbRow] = []

        def load_of(tenant: str) -> tuple[float, float]:
            return held[tenant] / shares[tenant].weight, shares[tenant].served_tokens / shares[tenant].weight

        while True:
            takers = sorted(+waiting, key=lambda taker: (-taker[1], load_of(taker[0])))
            givers = sorted(movable, key=lambda job: load_of(job["tenant"]), reverse=True)
            pairs = ((taker, job) for taker in takers for job in givers if job["priority"] <= taker[1])
            found = next((pair for pair in pairs if _may_take(pair[0][0], pair[1], held, shares)), None)
            if found is None:
                return chosen or None
            taker, job = found
            held[taker[0]] += 1
            held[job["tenant"]] -= 1
            waiting[taker] -= 1
            movable.remove(job)
            chosen.append(job)


def _may_take(taker: str, job: DbRow, held: Counter[str], shares: Mapping[str, Share]) -> bool:
    giver = job["tenant"]
    if giver == taker:
        return False
    to, of = shares[taker], shares[giver]
    if (held[taker] + 1) / to.weight <= (held[giver] - 1) / of.weight:
        return True
    return held[taker] == 0 and (to.served_tokens + QUANTUM_TOKENS) / to.weight <= of.served_tokens / of.weight


def _waiting(tx: Tx, base_model: str, load: WorkerLoad, at: float) -> Counter[tuple[str, int]]:
    """Counts the free jobs that fit this worker by tenant and priority."""
    free = free_jobs(base_model, at).where(JOBS.c.wanted.is_(None), JOBS.c.attempts < SUSPECT_AFTER)
    if load.max_length is not None:
        free = free.where(LENGTH.element <= load.max_length)
    if load.job_bytes is not None:
        free = free.where(sa.func.coalesce(JOBS.c.min_job_bytes, 0) <= load.job_bytes)
    jobs = free.order_by(None).subquery()
    query = sa.select(jobs.c.tenant, jobs.c.priority, sa.func.count()).group_by(jobs.c.tenant, jobs.c.priority)
    return Counter({(str(tenant), int(priority)): int(number) for tenant, priority, number in tx.execute(query)})


def _is_worth_moving(job: DbRow, at: float) -> bool:
    if job["status"] != "running" or job["wanted"] is not None or job["attempts"] >= SUSPECT_AFTER:
        return False
    return job["estimated_finish"] is not None and job["estimated_finish"] - at >= WORTH_S
