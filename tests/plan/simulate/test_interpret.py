"""Simulated pipelines take exactly as long as the published formulas predict."""

from __future__ import annotations

import pytest
from covering import each_pair
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.cost.types import LinearCost
from weft.plan.pack import pack
from weft.plan.pipeline.build import Schedule, build
from weft.plan.program import Backward, Forward, Program, Receive
from weft.plan.simulate.interpret import simulate, simulate_turns
from weft.plan.simulate.timeline import Timeline
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment


def equal(num_jobs: int, num_batches: int, per_batch: int = 1) -> list[Microbatch]:
    """Microbatches of one token: all jobs' first global batches, then all second ones, …"""
    return [
        Microbatch((Segment(f"job{job}", step, index, 1),))
        for step in range(num_batches)
        for job in range(num_jobs)
        for index in range(per_batch)
    ]


def starts(timeline: Timeline, every: int) -> list[float]:
    """When stage 0 begins the first forward of each round of so many microbatches."""
    first = (s for s in timeline.spans if s.stage == 0 and s.name == "forward")
    return [span.start_s for span in first if span.args["microbatch"] % every == 0]


def steady_bubble(num_stages: int, num_jobs: int, per_batch: int, cost: LinearCost) -> float:
    """Bubble ratio of LoRAPP once every round repeats the one before, measured over whole rounds."""
    num_batches = 6 if num_jobs * per_batch > 8 else 14
    program = build(Schedule.LORAPP, equal(num_jobs, num_batches, per_batch), num_stages, cost=cost)
    timeline = simulate(program, cost)
    begin = starts(timeline, num_jobs * per_batch)
    return timeline.bubble_ratio(begin[num_batches // 2 - 1], begin[-2])


@pytest.mark.parametrize(("num_stages", "jobs", "n"), each_pair(range(1, 9), range(1, 9), (1, 2, 3, 5)))
def test_lorapp_bubble_equals_the_formula(num_stages: int, jobs: int, n: int) -> None:
    """max((D - 1 + N - L N)/(D + N - 1), 0) for L jobs of N microbatches each."""
    formula = max((num_stages - 1 + n - jobs * n) / (num_stages + n - 1), 0)
    assert steady_bubble(num_stages, jobs, n, LinearCost()) == pytest.approx(formula, abs=1e-9)


@given(num_stages=st.integers(1, 8), num=st.integers(1, 10), ratio=st.sampled_from([0.5, 1.0, 2.0]))
def test_gpipe_bubble_equals_the_formula(num_stages: int, num: int, ratio: float) -> None:
    """(D - 1)/(N + D - 1), however long a backward is; 1F1B has the same."""
    cost = LinearCost(backward_ratio=ratio)
    formula = (num_stages - 1) / (num + num_stages - 1)
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        timeline = simulate(build(schedule, equal(1, 2, num), num_stages), cost)
        assert timeline.bubble_ratio() == pytest.approx(formula)


@pytest.mark.parametrize("backward_s", [1.0, 2.0])
@pytest.mark.parametrize("transfer_s", [0.0, 0.5, 1.0, 4.0])
def test_step_latency_equals_the_formula(backward_s: float, transfer_s: float) -> None:
    """max(Cs, Cr, Df) + max(Cs, Cr, Db) more for every further microbatch, if the pipeline is kept supplied."""
    cost = LinearCost(backward_ratio=backward_s, send_s=transfer_s)
    few, many = (simulate(build(Schedule.EAGER, equal(48, rounds), 3, cost=cost), cost).makespan_s for rounds in (2, 4))
    formula = max(transfer_s, 1.0) + max(transfer_s, backward_s)
    assert (many - few) / 96 == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("num_jobs", range(1, 9))
def test_full_pipeline_needs_a_distance_of_its_stages(num_jobs: int) -> None:
    """Equal microbatches take (N + S - 1) rounds if a job's batches are S apart, and longer if they are closer."""
    num_stages, stream = 4, equal(num_jobs, 6)
    least = (len(stream) + num_stages - 1) * 2.0
    for schedule in (Schedule.MULTI_ADAPTER, Schedule.LORAPP, Schedule.EAGER):
        makespan = simulate(build(schedule, stream, num_stages), LinearCost()).makespan_s
        assert makespan == least if num_jobs >= num_stages else makespan > least


def test_empty_microbatches_cost_nothing() -> None:
    """A no-op keeps its place in the order and takes no time, no memory and no transfer."""
    cost = LinearCost(fixed_s=5.0, send_s=1.0)
    full = equal(1, 1, 2)
    with_empty = [full[0], Microbatch(()), full[1]]
    plain, padded = (simulate(build(Schedule.GPIPE, m, 2), cost) for m in (full, with_empty))
    assert plain.makespan_s == padded.makespan_s
    assert all(padded.peak_bytes(stage) == 2 for stage in range(2))


def test_memory_over_time_reaches_the_peak_of_the_program_and_returns_to_nothing() -> None:
    """What the timeline shows is what the validator counts."""
    program = build(Schedule.ONE_F_ONE_B, equal(2, 2, 3), 3)
    timeline = simulate(program, LinearCost())
    assert [timeline.peak_bytes(s) for s in range(3)] == [3, 2, 1]
    for stage in range(3):
        own = [point for point in timeline.memory if point.stage == stage]
        assert own[-1].held_bytes == 0 and [p.time_s for p in own] == sorted(p.time_s for p in own)


def test_program_that_blocks_is_named_instead_of_run_for_ever() -> None:
    """A receive that no send serves."""
    (microbatch,) = equal(1, 1)
    program = Program((microbatch,), ((Forward(0), Backward(0)), (Receive(0, False, 0), Forward(0))))
    with pytest.raises(PlanError, match=r"stage 1 waits for ever at Receive\(microbatch=0"):
        simulate(program, LinearCost())


def test_engine_program_gives_the_spans_that_the_engine_records() -> None:
    """One span per microbatch, one for steps that follow each other, with the engine's names and arguments."""
    queues = [JobQueue(job, (Batch(0, 0, (3, 4)),), True) for job in ("a", "b")]
    program = pack(queues, Limits(capacity=20))
    cost = LinearCost(fixed_s=1.0, token_s=0.5, pair_s=0.1, backward_ratio=2.0, optimizer_s=0.25)
    timeline = simulate_turns(program, cost)
    assert [(s.name, s.args) for s in timeline.spans] == [
        ("forward_backward", {"tokens": 14, "jobs": {"a": 7, "b": 7}}),
        ("step", {"jobs": {"a": 0, "b": 0}}),
    ]
    forward = 1.0 + 7.0 + 0.1 * 50
    assert timeline.makespan_s == pytest.approx(3 * forward + 0.5)
    assert timeline.bubble_ratio() == pytest.approx(0.0) and timeline.peak_bytes(0) == 14


def test_step_of_a_later_stage_waits_until_the_first_has_measured_the_whole_gradient() -> None:
    """The last batch's steps come when its gradients are back at the first stage."""
    timeline = simulate(build(Schedule.ONE_F_ONE_B, equal(1, 1, 3), 3), LinearCost(optimizer_s=0.5))
    last = max(span.end_s for span in timeline.spans if span.stage == 0 and span.name == "backward")
    assert [span.start_s for span in timeline.spans if span.name == "step"] == [last] * 3
