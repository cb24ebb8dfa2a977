"""Who is admitted over many replicas is who a walk admits that finds room wherever there is a way to make it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from place_cases import job

from weft.job_state import Reason, ReasonCode
from weft.plan.admit import Applicant, Budget, admit_to
from weft.plan.place import Replica, assign_jobs

Left = tuple[tuple[int, int], ...]


class ExactRoom:
    """Takes a job if there is any way to seat it beside those before it."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.order: list[Applicant] = []
        self.empty: Left = tuple(sorted((r.budget.usable_bytes or 0, r.budget.max_jobs or 99) for r in replicas))

    def why_never(self, num_bytes: int) -> Reason | None:
        return None

    def take(self, applicant: Applicant) -> Reason | None:
        sizes = tuple(sorted((a.num_bytes for a in (*self.order, applicant)), reverse=True))
        if not can_seat(sizes, self.empty):
            return Reason(ReasonCode.NO_SEAT, "waits")
        self.order.append(applicant)
        return None


@cache
def can_seat(sizes: tuple[int, ...], left: Left) -> bool:
    if not sizes:
        return True
    for room in sorted(set(left)):
        num_bytes, num_jobs = room
        if num_bytes >= sizes[0] and num_jobs:
            rest = list(left)
            rest[rest.index(room)] = (num_bytes - sizes[0], num_jobs - 1)
            if can_seat(sizes[1:], tuple(sorted(rest))):
                return True
    return False


def test_assign_jobs_when_memory_is_short_then_nearly_always_admits_whom_an_exhaustive_walk_admits():
    """A fixed set of 40: jobs are placed, some end, others come, and all are placed again."""
    same = 0
    for seed in range(40):
        drawn = random.Random(seed)
        replicas = [
            Replica(f"r{i}", Budget(drawn.randint(15, 30), max_jobs=drawn.choice([None, 3, 5])))
            for i in range(drawn.randint(2, 4))
        ]
        jobs = [
            job(f"job{i:02}", drawn.uniform(10, 1000), num_bytes=drawn.randint(1, 12), arrival=i, priority=i % 3)
            for i in range(6 * len(replicas))
        ]
        first = assign_jobs(jobs[:-4], replicas)
        jobs = [replace(c, replica=first.replica_of.get(c.job)) for c in jobs if drawn.random() < 0.8]
        seated = [c.applicant for c in jobs if c.replica]
        exact = admit_to(ExactRoom(replicas), [c.applicant for c in jobs if not c.replica], seated)
        same += assign_jobs(jobs, replicas).replica_of.keys() == {*exact.start, *exact.keep}
    assert same >= 38
