"""Placed jobs run to their end: work is conserved, who waits comes in, and moves cost what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replicas.placing import simulate_placement
from weft.errors import PlanError
from weft.plan.admit import Applicant, Budget
from weft.plan.place import Candidate, Replica


def jobs(*seconds: float) -> list[Candidate]:
    return [Candidate(Applicant(f"job{i}", i, 1), s) for i, s in enumerate(seconds)]


def replicas(num: int, max_jobs: int | None = None) -> list[Replica]:
    return [Replica(f"r{i}", Budget(max_jobs=max_jobs)) for i in range(num)]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=8), st.none() | st.integers(1, 3))
def test_simulate_placement_when_there_is_one_replica_then_takes_the_sum(seconds, max_jobs):
    run = simulate_placement(jobs(*seconds), replicas(1, max_jobs))
    assert run.makespan_s == pytest.approx(sum(seconds))
    assert (len(run.ends_s), run.num_moves) == (len(seconds), 0)


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=12), st.integers(2, 4), st.none() | st.integers(1, 3))
def test_simulate_placement_when_there_are_many_then_no_replica_falls_back(seconds, num, max_jobs):
    """Within what lists allow, and what moves cost: the work of all replicas and the longest job."""
    run = simulate_placement(jobs(*seconds), replicas(num, max_jobs), move_s=1.0)
    assert run.ends_s.keys() == {f"job{i}" for i in range(len(seconds))}
    assert run.makespan_s >= max(max(seconds), sum(seconds) / num) * (1 - 1e-9)
    assert run.makespan_s <= sum(seconds) / num + max(seconds) + (2 + run.num_moves) * 1.0


def test_simulate_placement_when_jobs_share_a_replica_then_each_has_its_part_of_the_time():
    run = simulate_placement(jobs(10, 30), [Replica("r0", speed=2.0)])
    assert run.ends_s == {"job0": 10.0, "job1": 20.0}


def test_simulate_placement_when_a_job_waits_then_it_comes_in_where_one_ends():
    run = simulate_placement(jobs(10, 30, 15), replicas(2, max_jobs=1))
    assert run.ends_s == {"job0": 10.0, "job2": 25.0, "job1": 30.0}


def test_simulate_placement_when_a_replica_runs_dry_then_a_job_moves_there_and_pays_for_it():
    run = simulate_placement(jobs(100, 99, 40, 30, 1), replicas(2), move_s=2.0)
    assert run.num_moves == 0
    seated = [Candidate(Applicant(f"job{i}", i), 100.0, "r0") for i in range(2)]
    run = simulate_placement(seated, replicas(2), move_s=2.0)
    assert (run.num_moves, run.makespan_s) == (1, 102.0)


def test_simulate_placement_when_a_job_fits_nowhere_then_reports_it():
    too_large = [Candidate(Applicant("wide", 0, 20), 1.0)]
    with pytest.raises(PlanError, match="replicas: no replica can take what is left: wide"):
        simulate_placement(too_large, [Replica("r0", Budget(10))])
