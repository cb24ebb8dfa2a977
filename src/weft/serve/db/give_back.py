"""Decides which of its jobs a worker gives back so that others get their part: other workers, or other tenants.

A job that is given back is saved at its next step boundary, goes back to the queue and loses nothing. Numbers must have
been unequal for `STABLE_S`, and after that a worker keeps its other jobs for `REST_S`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from weft.plan.admit import QUANTUM_TOKENS, Share
from weft.serve.db.engine import DbRow, Tx
from weft.serve.db.leases import SUSPECT_AFTER, free_jobs, has_free, held_by_tenant, shares_of
from weft.serve.db.tables import JOBS
from weft.serve.db.workers import LENGTH, WorkerLoad, loads_of, num_to_give_back

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
        if at < self._look_at:
            return []
        self._look_at = at + LOOK_S
        chosen = self._chosen(tx, worker, base_model, [job for job in jobs if _is_worth_moving(job, at)], at)
        if chosen is None:
            self._unequal_since = None
            return []
        if self._unequal_since is None:
            self._unequal_since = at
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
