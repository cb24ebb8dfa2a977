"""The checker finds every fault that is planted in a placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from place_cases import alike, job

from benchmarks.replicas.placement_check import violations
from weft.job_state import Reason, ReasonCode
from weft.plan.admit import Admission, Budget, HeldJob
from weft.plan.place import Candidate, JobPlacement, Move, Replica, assign_jobs

REPLICAS = [*alike(2, total_bytes=10, max_jobs=2), Replica("r2", is_draining=True)]
JOBS = [
    job("a", 100, "r0", num_bytes=4),
    job("b", 90, "r1", num_bytes=4),
    job("c", 10, num_bytes=4, arrival=1),
    job("d", 20, "r1", num_bytes=4, arrival=1),
    job("e", 5, num_bytes=4, arrival=2),
]
PLACEMENT = assign_jobs(JOBS, REPLICAS)
BUSY = Reason(ReasonCode.NO_SEAT, "waits")


def seated(jobs: list[Candidate], held: tuple[str, ...] = (), **replica_of: str) -> JobPlacement:
    """A placement with these seats, described correctly."""
    was = {c.job: c.replica for c in jobs}
    ends: dict[str, float] = {}
    for c in jobs:
        if c.job in replica_of:
            ends[replica_of[c.job]] = ends.get(replica_of[c.job], 0.0) + c.seconds_left
    moves = (Move(name, str(was[name]), at) for name, at in sorted(replica_of.items()) if was[name] not in (None, at))
    keep = tuple(name for name in replica_of if was[name])
    start = tuple(name for name in replica_of if not was[name])
    admission = Admission(start, keep, wait=tuple(HeldJob(name, BUSY) for name in held))
    return JobPlacement(admission, replica_of, tuple(moves), max(ends.values()))


def test_violations_when_nothing_is_wrong_then_none():
    assert violations(PLACEMENT, JOBS, REPLICAS) == []
    assert violations(seated(JOBS, ("e",), a="r0", c="r0", b="r1", d="r1"), JOBS, REPLICAS) == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (seated(JOBS, (), a="r0", c="r0", b="r1", d="r1"), "e has 0 answers"),
        (seated(JOBS, ("e", "a"), a="r0", c="r0", b="r1", d="r1"), "a has 2 answers"),
        (seated(JOBS, ("e", "x"), a="r0", c="r0", b="r1", d="r1"), "x has an answer and is no candidate"),
        (replace(PLACEMENT, replica_of={**PLACEMENT.replica_of, "e": "r0"}), "e is admitted and has no replica, or"),
        (seated(JOBS, ("e",), a="r2", c="r0", b="r1", d="r1"), "a is on r2, which is draining"),
        (seated(JOBS, ("e",), a="r9", c="r0", b="r1", d="r1"), "a is on r9, which is not there"),
        (seated(JOBS, ("d",), a="r0", c="r0", e="r0", b="r1"), "r0 holds 3 jobs of 12 bytes"),
        (replace(PLACEMENT, moves=(Move("a", "r1", "r0"),)), "a: a move from r1 to r0 is not made, or not reported"),
        (replace(PLACEMENT, makespan_s=1.0), "the placement has 1 s"),
        (seated(JOBS, ("d", "e"), a="r0", c="r0", b="r1"), "d does not train; it fits on r1"),
    ],
)
def test_violations_when_something_is_wrong_then_reports_what(wrong, text):
    assert text in " ".join(violations(wrong, JOBS, REPLICAS))


def test_violations_when_a_lower_priority_has_the_seat_then_reports_it():
    jobs = [job("low", 10, "r0"), job("high", 10, priority=1)]
    found = violations(seated(jobs, ("high",), low="r0"), jobs, alike(1, max_jobs=1))
    assert found == ["high does not train; it fits on r0 beside those of its priority."]


def test_violations_when_a_replica_is_idle_for_nothing_then_reports_it():
    jobs = [job("a", 100, "r0"), job("b", 50, "r0")]
    stays = seated(jobs, a="r0", b="r0")
    assert violations(stays, jobs, alike(2)) == ["r1 is idle while r0 has 2 jobs; a would gain there."]
    assert violations(stays, jobs, alike(2), move_s=50.0) == []
    assert violations(stays, jobs, [*alike(1), Replica("r1", speed=0.1)]) == []
    assert violations(stays, jobs, [*alike(1), Replica("r1", Budget(0))]) == []


def test_violations_when_a_move_is_of_no_use_then_reports_it():
    jobs = [job("a", 100, "r0"), job("b", 10, "r1"), job("c", 10, "r2"), job("d", 10, "r1")]
    moved = seated(jobs, a="r0", b="r2", c="r2", d="r1")
    assert violations(moved, jobs, alike(3)) == ["b moves from r1 to r2 and nothing ends sooner for it."]
