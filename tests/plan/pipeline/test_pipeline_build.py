"""Every schedule gives a program that trains each job exactly in its order, whatever the stream."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_streams import streams

from benchmarks.planning.published import lemma_violations
from weft.errors import PlanError
from weft.plan.check import violations
from weft.plan.choose_layout import split_layers
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import Schedule, build
from weft.plan.program import Backward, Forward, Program
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Microbatch, Segment, lemma_distance

COST = LinearCost(fixed_s=1.0, backward_ratio=1.5, send_s=0.1, optimizer_s=0.5)


def equal(num_jobs: int, num_batches: int, per_batch: int = 1) -> list[Microbatch]:
    """Microbatches of 8 tokens: all jobs' first global batches, then all second ones, …"""
    return [
        Microbatch((Segment(f"job{job}", step, index, 8),))
        for step in range(num_batches)
        for job in range(num_jobs)
        for index in range(per_batch)
    ]


def order(program_stage: tuple[object, ...]) -> str:
    """What a stage computes: F0 F1 B0 …"""
    return " ".join(
        f"{'F' if isinstance(i, Forward) else 'B'}{i.microbatch}"
        for i in program_stage
        if isinstance(i, Forward | Backward)
    )


@pytest.mark.parametrize("schedule", list(Schedule))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 5))
def test_build_of_any_stream_passes_the_validator_and_runs(
    schedule: Schedule, data: st.DataObject, num_stages: int
) -> None:
    """No sample is lost, no program is refused, and none blocks."""
    stream = data.draw(streams(schedule))
    program = build(schedule, stream, num_stages, cost=COST)
    assert violations(program) == []
    assert sorted(str(m) for m in program.microbatches if m.segments) == sorted(map(str, stream))
    timeline = simulate(program, COST)
    assert program == build(schedule, stream, num_stages, cost=COST)
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program
    work = sum(timeline.busy_s(stage) for stage in range(num_stages))
    transfers = sum(span.duration_s for span in timeline.spans if span.name == "send")
    assert timeline.makespan_s <= work + transfers + 1e-6


@pytest.mark.parametrize("schedule", list(Schedule))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 4))
def test_build_under_any_sufficient_memory_stays_within_it(
    schedule: Schedule, data: st.DataObject, num_stages: int
) -> None:
    """Each stage keeps at most its own limit, down to room for the largest microbatch alone."""
    stream = data.draw(streams(schedule))
    largest = max(m.num_tokens for m in stream)
    limits = [data.draw(st.integers(largest, 3 * largest)) for _ in range(num_stages)]
    program = build(schedule, stream, num_stages, cost=COST, memory_bytes=limits)
    assert violations(program, cost=COST, memory_bytes=limits) == []
    assert all(simulate(program, COST).peak_bytes(stage) <= limit for stage, limit in enumerate(limits))


def test_1f1b_of_one_batch_alternates_after_a_warmup_of_the_stages_left() -> None:
    """The textbook order, stage by stage."""
    program = build(Schedule.ONE_F_ONE_B, equal(1, 1, 4), 3)
    assert [order(stage) for stage in program.stages] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_flushes_between_global_batches() -> None:
    """All forwards of a batch, all its backwards, then the next batch."""
    program = build(Schedule.GPIPE, equal(1, 2, 2), 2)
    assert [order(stage) for stage in program.stages] == ["F0 F1 B0 B1 F2 F3 B2 B3"] * 2


def test_gpipe_flushes_between_jobs_that_do_not_wait_for_each_other() -> None:
    """A classic schedule knows nothing of other jobs."""
    program = build(Schedule.GPIPE, equal(2, 1, 2), 2)
    assert [order(stage) for stage in program.stages] == ["F0 F1 B0 B1 F2 F3 B2 B3"] * 2


def test_multi_adapter_stream_that_breaks_the_lemma_gets_noops() -> None:
    """One job alone: its batches are kept S - 1 apart by empty microbatches."""
    program = build(Schedule.MULTI_ADAPTER, equal(1, 3), 4)
    assert [bool(m.segments) for m in program.microbatches] == [True, False, False, True, False, False, True]
    assert lemma_violations(program.microbatches, lemma_distance(4)) == []


def test_template_runs_the_slowest_bucket_first_and_buckets_together() -> None:
    """Given mixed up, they come out together, each job's in its own order."""
    stream = [
        Microbatch((Segment(job, 0, i, n),)) for i, (job, n) in enumerate([("a", 3), ("b", 9), ("a", 4), ("b", 8)])
    ]
    program = build(Schedule.TEMPLATE, stream, 2)
    assert [m.segments[0].length for m in program.microbatches] == [9, 8, 3, 4]


def test_template_with_more_memory_launches_more() -> None:
    """The first stage fills its memory before the first backward returns."""
    stream = equal(1, 1, 8)
    for room in (2, 3, 5):
        program = build(Schedule.TEMPLATE, stream, 4, memory_bytes=[8 * room] * 4)
        first = order(program.stages[0]).split()
        assert len(list(itertools.takewhile(lambda visit: visit[0] == "F", first))) == room


def test_template_finishes_a_round_before_the_next() -> None:
    """Also for a job whose own batch was back long before."""
    first = order(build(Schedule.TEMPLATE, equal(3, 2, 2), 2).stages[0]).split()
    assert sorted(first[:12]) == sorted(f"{way}{k}" for way in "FB" for k in range(6))


def test_lorapp_keeps_at_most_the_stages_left_in_flight() -> None:
    """As 1F1B does, however many jobs there are."""
    timeline = simulate(build(Schedule.LORAPP, equal(8, 3), 4), LinearCost())
    assert [timeline.peak_bytes(stage) for stage in range(4)] == [32, 24, 16, 8]


def test_lorapp_takes_jobs_in_turns_and_never_flushes() -> None:
    """Given job after job, it fills the pipe with one batch of each."""
    stream = sorted(equal(2, 2), key=lambda m: m.segments[0].job)
    program = build(Schedule.LORAPP, stream, 2)
    assert [(m.segments[0].job, m.segments[0].step) for m in program.microbatches] == [
        ("job0", 0),
        ("job1", 0),
        ("job0", 1),
        ("job1", 1),
    ]
    assert order(program.stages[0]) == "F0 F1 B0 F2 B1 F3 B2 B3"


SAMPLE = Microbatch((Segment("a", 0, 0, 8),))
MIXED = Microbatch((Segment("a", 0, 0, 8), Segment("b", 0, 0, 8)))
TWO_STEPS = Microbatch((Segment("a", 0, 0, 8), Segment("a", 1, 0, 8)))
BACKWARDS = [Microbatch((Segment("a", 1, 0, 8),)), SAMPLE]


@pytest.mark.parametrize(
    ("schedule", "stream", "options", "problem"),
    [
        (Schedule.EAGER, [], {"num_stages": 2}, "no sample"),
        (Schedule.EAGER, [Microbatch(())], {"num_stages": 2}, "no sample"),
        (Schedule.EAGER, [SAMPLE], {"num_stages": 2, "memory_bytes": [8, 7]}, "stage 1: microbatch 0 keeps 8 bytes"),
        (Schedule.ONE_F_ONE_B, [SAMPLE], {"num_stages": 2, "memory_bytes": [7, 8]}, "stage 0: microbatch 0 keeps 8"),
        (Schedule.LORAPP, [MIXED], {"num_stages": 2}, "2 global batches"),
        (Schedule.ONE_F_ONE_B, BACKWARDS, {"num_stages": 2}, "step 1 of a has samples in microbatch 0"),
        (Schedule.EAGER, [TWO_STEPS], {"num_stages": 2}, "step 1 of a has samples in microbatch 0"),
        (Schedule.TEMPLATE, [Microbatch(()), SAMPLE], {"num_stages": 2}, "0 rounds"),
    ],
)
def test_build_of_the_impossible_gives_the_reason(
    schedule: Schedule, stream: list[Microbatch], options: dict[str, object], problem: str
) -> None:
    """One sentence names the stage or microbatch and what would be right."""
    with pytest.raises(PlanError, match=problem):
        build(schedule, stream, **options)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(times=st.lists(st.integers(1, 9), min_size=1, max_size=8), data=st.data())
def test_split_layers_is_as_even_as_any_cut(times: list[int], data: st.DataObject) -> None:
    """Equal to brute force over all cuts."""
    num_stages = data.draw(st.integers(1, len(times)))
    counts = split_layers([float(t) for t in times], num_stages)
    assert len(counts) == num_stages and sum(counts) == len(times) and min(counts) >= 1

    def slowest(bounds: tuple[int, ...]) -> int:
        return max(sum(times[a:b]) for a, b in itertools.pairwise((0, *bounds, len(times))))

    cuts = itertools.combinations(range(1, len(times)), num_stages - 1)
    assert slowest(tuple(itertools.accumulate(counts))[:-1]) == min(map(slowest, cuts))


def test_split_layers_gives_the_stage_with_the_head_fewer_layers() -> None:
    """80 layers and a head of 1.23 on 4 stages; more stages than layers is refused."""
    assert split_layers([1.0] * 79 + [2.23], 4) == (21, 20, 20, 19)
    with pytest.raises(PlanError, match="2 layers cannot be cut into 3 stages; use 1 to 2"):
        split_layers([1.0, 1.0], 3)


def test_steps_of_several_stages_wait_for_the_jobs_next_forward() -> None:
    """By then the norm of the whole gradient is known without anybody waiting for it."""
    program = build(Schedule.ONE_F_ONE_B, equal(1, 2), 2)
    kinds = " ".join(type(i).__name__ for i in program.stages[1])
    assert kinds == "Receive Forward Backward Measure Send Receive Step Forward Backward Measure Send Step"
    alone = build(Schedule.ONE_F_ONE_B, equal(1, 2), 1)
    assert [type(i).__name__ for i in alone.stages[0]] == ["Forward", "Backward", "Step"] * 2


def test_template_that_keeps_the_order_puts_linked_microbatches_together_slowest_first() -> None:
    """No job's samples change places, whatever the others' lengths."""
    lengths = [("a", 1), ("b", 2), ("a", 9), ("c", 5)]
    seen: dict[str, int] = {}
    stream = []
    for job, length in lengths:
        stream.append(Microbatch((Segment(job, 0, seen.get(job, 0), length),)))
        seen[job] = seen.get(job, 0) + 1
    program = build(Schedule.TEMPLATE, stream, 2)
    assert [(m.segments[0].job, m.num_tokens) for m in program.microbatches] == [("a", 1), ("a", 9), ("c", 5), ("b", 2)]
