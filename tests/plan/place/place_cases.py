"""Jobs and replicas drawn at random, and the best placements of few of them, found by trying all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from weft.plan.admit import QUANTUM_TOKENS, Applicant, Budget, Share
from weft.plan.place import Candidate, JobPlacement, Replica

Case = tuple[list[Candidate], list[Replica], dict[str, Share]]


def job(
    name: str,
    seconds_left: float,
    replica: str | None = None,
    *,
    num_bytes: int = 1,
    arrival: int = 0,
    priority: int = 0,
    tenant: str = "default",
    home: str | None = None,
) -> Candidate:
    """A job to place."""
    return Candidate(Applicant(name, arrival, num_bytes, priority, tenant), seconds_left, replica, home)


def alike(num: int, **budget: int) -> list[Replica]:
    """So many replicas of speed 1."""
    return [Replica(f"r{i}", Budget(**budget)) for i in range(num)]


@st.composite
def cases(draw: st.DrawFn, most_jobs: int = 10, most_replicas: int = 4) -> Case:
    """Replicas of all kinds, jobs on them or on none, and tenants' shares; what sits somewhere may be too much."""
    replicas = [
        Replica(
            f"r{i}",
            Budget(draw(st.none() | st.integers(0, 30)), max_jobs=draw(st.none() | st.integers(1, 4))),
            draw(st.sampled_from([0.5, 1.0, 2.0])),
            draw(st.integers(0, 9)) == 0,
        )
        for i in range(draw(st.integers(0, most_replicas)))
    ]
    seats = st.sampled_from([None, "gone", *(replica.name for replica in replicas)])
    jobs = [
        job(
            f"job{i}",
            draw(st.floats(0, 1000)),
            draw(seats),
            num_bytes=draw(st.integers(0, 12)),
            arrival=arrival,
            priority=draw(st.integers(0, 2)),
            tenant=draw(st.sampled_from("xyz")),
            home=draw(seats),
        )
        for i, arrival in enumerate(draw(st.permutations(range(draw(st.integers(0, most_jobs))))))
    ]
    weights = {tenant: draw(st.sampled_from([0.5, 1.0, 3.0])) for tenant in "xyz"}
    return jobs, replicas, {t: Share(weight, draw(st.integers(0, 5)) * QUANTUM_TOKENS) for t, weight in weights.items()}


def after(placement: JobPlacement, jobs: Sequence[Candidate]) -> list[Candidate]:
    """The jobs once a placement has been carried out."""
    return [replace(c, replica=placement.replica_of.get(c.job)) for c in jobs]


def best_makespan_s(jobs: Sequence[Candidate], replicas: Sequence[Replica]) -> float:
    """The least makespan of all ways to seat all these jobs; inf if there is none."""
    ways = np.array(list(itertools.product(range(len(replicas)), repeat=len(jobs))), dtype=int)
    seconds = np.array([c.seconds_left for c in jobs])
    num_bytes = np.array([c.applicant.num_bytes for c in jobs])
    last, fits = np.zeros(len(ways)), np.ones(len(ways), dtype=bool)
    for index, replica in enumerate(replicas):
        here = ways == index
        last = np.maximum(last, here @ seconds / replica.speed)
        fits &= here @ num_bytes <= (np.inf if replica.budget.usable_bytes is None else replica.budget.usable_bytes)
        fits &= here.sum(axis=1) <= (replica.budget.max_jobs or np.inf)
    return float(np.where(fits, last, np.inf).min())
