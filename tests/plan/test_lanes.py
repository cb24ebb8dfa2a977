"""For every planner, lanes never share a microbatch and groups are never split; without them nothing changes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.check import violations
from weft.plan.pack import pack, planner_named
from weft.plan.pack.greedy import pack_lane
from weft.plan.planner import PlanFunction
from weft.plan.program import Program, Step
from weft.plan.types import Batch, JobQueue, Limits

CAPACITY = 12
PLANNERS = [planner_named(name) for name in ("greedy", "auto", "exact")]


@st.composite
def grouped(draw: st.DrawFn, step: int, first: int) -> Batch:
    """A global batch of groups that fit a microbatch, or of samples by themselves."""
    if draw(st.booleans()):
        return Batch(step, first, tuple(draw(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=5))))
    groups = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4))
    return Batch(step, first, tuple(n for group in groups for n in group), tuple(map(len, groups)))


@st.composite
def waiting(draw: st.DrawFn) -> list[JobQueue]:
    """Jobs of up to three lanes; the first global batch of one may be partly done, or wait for its step alone."""
    queues = []
    for number in range(draw(st.integers(1, 4))):
        start, first = draw(st.integers(0, 2)), draw(st.integers(0, 3))
        batches = [draw(grouped(start + i, first if i == 0 else 0)) for i in range(draw(st.integers(1, 3)))]
        if first and draw(st.booleans()):
            batches[0] = Batch(start, first, ())
        queues.append(
            JobQueue(
                job=f"job{number}",
                batches=tuple(batches),
                is_all=draw(st.booleans()),
                priority=draw(st.integers(0, 1)),
                served_tokens=draw(st.integers(0, 20)),
                lane=draw(st.sampled_from(["", "", "x", "y"])),
            )
        )
    return queues


LIMITS = st.builds(Limits, st.just(CAPACITY), st.integers(1, 8))


def lanes_apart(queues: list[JobQueue], program: Program) -> bool:
    lane = {q.job: q.lane for q in queues}
    return all(len({lane[s.job] for s in m.segments}) == 1 for m in program.microbatches)


def groups_whole(queues: list[JobQueue], program: Program) -> bool:
    """Each sample's companions are where it is."""
    microbatch_of = {(s.job, s.step, s.index): k for k, m in enumerate(program.microbatches) for s in m.segments}
    for q in queues:
        for batch in q.batches:
            index = batch.first
            for size in batch.groups:
                if len({microbatch_of.get((q.job, batch.step, i)) for i in range(index, index + size)}) > 1:
                    return False
                index += size
    return True


def without(queues: list[JobQueue]) -> list[JobQueue]:
    """The same jobs in one lane, every sample by itself."""
    return [
        dataclasses.replace(q, lane="", batches=tuple(dataclasses.replace(b, groups=()) for b in q.batches))
        for q in queues
    ]


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=60, deadline=None)
@given(queues=waiting(), limits=LIMITS)
def test_planner_when_jobs_have_lanes_and_groups_then_its_program_is_valid_and_not_too_long(
    planner: PlanFunction, queues: list[JobQueue], limits: Limits
) -> None:
    program = planner(queues, limits)
    assert violations(program, queues, limits) == []
    assert lanes_apart(queues, program) and groups_whole(queues, program)
    assert len(program.microbatches) <= limits.max_microbatches and any(program.stages)


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=40, deadline=None)
@given(queues=waiting())
def test_planner_when_every_job_lists_all_then_everything_runs(planner: PlanFunction, queues: list[JobQueue]) -> None:
    queues = [dataclasses.replace(q, is_all=True) for q in queues]
    steps = {step for turn in planner(queues, Limits(CAPACITY, 1000)).turns for step in turn.steps}
    assert steps == {Step(q.job, b.step) for q in queues for b in q.batches}


@settings(max_examples=60, deadline=None)
@given(queues=waiting(), limits=LIMITS)
def test_program_when_planned_without_lanes_and_groups_then_refused_exactly_where_they_matter(
    queues: list[JobQueue], limits: Limits
) -> None:
    """The checker against an own count of what is mixed and what is split."""
    program = pack_lane(without(queues), limits)
    is_sound = lanes_apart(queues, program) and groups_whole(queues, program)
    assert (violations(program, queues, limits) == []) == is_sound


@settings(max_examples=40, deadline=None)
@given(queues=waiting(), limits=LIMITS, lane=st.sampled_from(["", "z"]))
def test_pack_when_all_jobs_are_in_one_lane_then_lane_and_groups_of_one_change_nothing(
    queues: list[JobQueue], limits: Limits, lane: str
) -> None:
    alone = without(queues)
    in_lane = [
        dataclasses.replace(
            q, lane=lane, batches=tuple(dataclasses.replace(b, groups=(1,) * len(b.lengths)) for b in q.batches)
        )
        for q in alone
    ]
    assert pack(in_lane, limits) == pack(alone, limits) == pack_lane(alone, limits)


def test_pack_when_a_lane_holds_one_job_then_it_gets_what_every_other_job_gets() -> None:
    """Lanes take turns by what their jobs have been served, not by their number."""
    names = {"alone": "x", "a": "", "b": "", "c": ""}
    queues = [JobQueue(job, (Batch(0, 0, (2,) * 200),), True, lane=lane) for job, lane in names.items()]
    served: Counter[str] = Counter()
    for microbatch in pack(queues, Limits(CAPACITY, 40)).microbatches:
        served.update(microbatch.job_tokens)
        assert max(served.values()) - min(served[job] for job in names) <= CAPACITY


def test_pack_when_lanes_differ_in_priority_then_the_highest_goes_first() -> None:
    queues = [
        JobQueue(lane, (Batch(0, 0, (CAPACITY,) * 3),), True, p, lane=lane) for lane, p in (("low", 0), ("top", 1))
    ]
    assert [m.segments[0].job for m in pack(queues, Limits(CAPACITY)).microbatches] == ["top"] * 3 + ["low"] * 3


def test_pack_when_a_lane_has_no_listed_sample_left_then_the_program_ends_for_all() -> None:
    """Its job has more to run, and must not wait until the other lane is done."""
    long = JobQueue("long", (Batch(0, 0, (CAPACITY,) * 9),), True, lane="x")
    short = JobQueue("short", (Batch(0, 0, (CAPACITY,)),), False, served_tokens=1)
    program = pack([long, short], Limits(CAPACITY))
    assert [m.segments[0].job for m in program.microbatches] == ["long", "short"]


@pytest.mark.parametrize("planner", PLANNERS)
def test_planner_when_a_group_is_longer_than_a_microbatch_then_refused_by_name(planner: PlanFunction) -> None:
    queues = [JobQueue("pairs", (Batch(3, 0, (2, 2, 7, 8), (2, 2)),), True)]
    with pytest.raises(PlanError, match=r"pairs step 3: 2 samples that belong together have 15 tokens; .* holds 12"):
        planner(queues, Limits(CAPACITY))


@pytest.mark.parametrize("groups", [(1,), (2, 2), (3, 0), (4, -1)])
def test_batch_when_its_groups_do_not_divide_its_samples_then_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="do not divide 3 samples"):
        Batch(0, 0, (5, 5, 5), groups)
