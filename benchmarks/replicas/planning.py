"""How long it takes to place jobs over replicas.

place_1000_s       1,000 jobs over 64 replicas, the slowest of three decisions: all jobs are new; some have ended, as
                   many have come, a replica is lost and one drains; the same where memory is too small for all jobs.
place_1000_ratio   the first one's makespan over the larger of two bounds that none can beat: the work of all replicas,
                   and the longest job.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

from weft.plan.admit import Applicant, Budget
from weft.plan.place import Candidate, JobPlacement, Replica, place, violations

NUM_JOBS, NUM_REPLICAS, MAX_JOBS = 1000, 64, 32
JOB_BYTES = (1, 9)
"""Memory of a job, in units of which a replica has 100, or 60 where that is too little for all."""
PLENTY, SCARCE = 100, 60
REPEATS = 3
"""Of every decision; other programs on the machine can only add to a time."""


def measure_placing(num_jobs: int = NUM_JOBS, num_replicas: int = NUM_REPLICAS) -> dict[str, float]:
    """Keys as in `python -m benchmarks replicas --json`."""
    times = []
    ratio = 0.0
    for memory in (PLENTY, SCARCE):
        drawn = random.Random(0)
        replicas = [Replica(f"r{i:02}", Budget(memory, max_jobs=MAX_JOBS)) for i in range(num_replicas)]
        jobs = _jobs(drawn, 0, num_jobs)
        first, first_s = _timed(jobs, replicas)
        if memory == PLENTY:
            least_s = max(sum(c.seconds_left for c in jobs) / num_replicas, max(c.seconds_left for c in jobs))
            ratio = first.makespan_s / least_s
            times.append(first_s)
        jobs = [replace(c, replica=first.replica_of.get(c.job)) for c in jobs if drawn.random() < 0.9]
        jobs += _jobs(drawn, num_jobs, num_jobs - len(jobs))
        replicas = [replace(replicas[1], is_draining=True), *replicas[2:]]
        times.append(_timed(jobs, replicas)[1])
    return {"place_1000_s": max(times), "place_1000_ratio": ratio}


def _timed(jobs: Sequence[Candidate], replicas: Sequence[Replica]) -> tuple[JobPlacement, float]:
    """A placement, and the least time that it took."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        placement = place(jobs, replicas)
        times.append(time.perf_counter() - began)
    assert not violations(placement, jobs, replicas)
    return placement, min(times)


def _jobs(drawn: random.Random, first: int, count: int) -> list[Candidate]:
    """Jobs of a quarter of an hour in the median, some much longer; three priorities, four tenants."""
    return [
        Candidate(
            Applicant(f"job{i:04}", i, drawn.randint(*JOB_BYTES), drawn.randint(0, 2), drawn.choice("abcd")),
            drawn.lognormvariate(6.8, 1.0),
        )
        for i in range(first, first + count)
    ]
