"""Microbatches in pairs: no common job, every job's order kept, and a checker that finds what is wrong with others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weft.errors import PlanError
from weft.plan.check import violations
from weft.plan.pack import pack
from weft.plan.pipeline.build import Schedule, build
from weft.plan.pipeline.pair import RowsHeld, cut, in_halves, side_by_side, together, two_groups, uncut
from weft.plan.program import Backward, Forward, Program, Step
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment

LIMITS, WIDE = (Limits(capacity, max_microbatches=10**6) for capacity in (64, 240))


def random_queues(seed: int, num_jobs: int) -> list[JobQueue]:
    draw = random.Random(seed)
    found = []
    for number in range(num_jobs):
        counts = [draw.randint(1, 6) for _ in range(draw.randint(1, 4))]
        batches = [Batch(step, 0, tuple(draw.randint(1, 60) for _ in range(n))) for step, n in enumerate(counts)]
        found.append(JobQueue(f"job{number}", tuple(batches), True))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_pairs_when_made_of_any_jobs_then_keep_to_the_rules_and_come_back_from_json(seed):
    """Packed together or in two groups."""
    queues = random_queues(seed, 2 + seed % 4)
    groups, apart = two_groups(queues, LIMITS.capacity)
    assert sorted(job for group in groups for job in group) == [queue.job for queue in queues]
    for stream in (apart, pack(queues, LIMITS).microbatches):
        program = side_by_side(stream)
        assert violations(program, queues, LIMITS) == []
        assert Program.from_json(program.to_json()) == program
        for first, second in program.pairs:
            assert not program.microbatches[first].job_tokens.keys() & program.microbatches[second].job_tokens.keys()


def test_pairs_when_two_jobs_have_as_much_then_every_microbatch_has_a_partner():
    """Those of one job, even of one global batch, never run side by side."""
    queues = [JobQueue(job, (Batch(0, 0, (40, 40)), Batch(1, 0, (40,))), True) for job in ("a", "b")]
    program = side_by_side(two_groups(queues, 64)[1])
    assert program.pairs == ((0, 1), (2, 3), (4, 5))
    assert program.stages[0][:4] == (Forward(0), Forward(1), Backward(0), Backward(1))
    assert program.stages[0][4:10] == (
        *(Forward(2), Forward(3), Backward(2), Backward(3)),
        *(Step("a", 0), Step("b", 0)),
    )
    groups, stream = two_groups(queues[:1], 64)
    assert groups == (("a",),) and side_by_side(stream).pairs == ()


@pytest.mark.parametrize("schedule", [Schedule.EAGER, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize("seed", range(8))
def test_halves_when_a_pipeline_is_cut_by_jobs_then_it_keeps_to_the_rules(seed, schedule):
    """What goes through the stages together is what went through them alone."""
    queues = random_queues(seed, 2 + seed % 3)
    program = build(schedule, pack(queues, WIDE).microbatches, 3)
    halved = in_halves(program)
    assert halved.pairs and violations(halved, queues, WIDE) == []
    parts = uncut(halved)
    assert [sorted(together(own).job_tokens.items()) for own in parts] == [
        sorted(own.job_tokens.items()) for own in program.microbatches
    ]
    assert {len(own) for own in parts if len(together(own).job_tokens) > 1} == {2}
    assert cut(program, [(own,) for own in program.microbatches]) == program
    assert in_halves(program, RowsHeld(1)) == program


def test_pairs_when_rows_are_bounded_then_no_two_have_more():
    """In tiles of 16 rows two microbatches of 17 tokens have 64."""

    def of(job: str, length: int) -> Microbatch:
        return Microbatch((Segment(job, 0, 0, length),))

    stream = [of("a", 17), of("b", 17), of("c", 40), of("d", 16)]
    assert side_by_side(stream, RowsHeld(64, 16)).pairs == ((0, 1), (2, 3))
    assert side_by_side(stream, RowsHeld(63, 16)).pairs == ((0, 1),)
    assert side_by_side(stream, RowsHeld(48)).pairs == ((0, 1),)
    assert side_by_side(stream, RowsHeld(33)).pairs == ((0, 1),)
    assert [m.job_tokens for m in side_by_side(stream, RowsHeld(33)).microbatches][1] == {"d": 16}


def test_pair_when_its_second_is_further_behind_then_overtakes_only_others_jobs():
    def of(*jobs: str) -> Microbatch:
        return Microbatch(tuple(Segment(job, 0, 0, 4) for job in jobs))

    def again(job: str) -> Microbatch:
        return Microbatch((Segment(job, 0, 1, 4),))

    # b may not pass the microbatch in which it shares with a; c may.
    program = side_by_side([of("a", "b"), again("a"), again("b"), of("c")])
    assert program.pairs == ((0, 1), (2, 3))
    assert [tuple(m.job_tokens) for m in program.microbatches] == [("a", "b"), ("c",), ("a",), ("b",)]


def paired() -> Program:
    queues = [JobQueue(job, (Batch(0, 0, (40, 40)),), True) for job in ("a", "b")]
    return side_by_side(two_groups(queues, 64)[1])


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        (((0, 2), (1, 3)), "a has samples in both"),
        (((0, 1), (1, 3)), "microbatch 1 is in 2 pairs"),
        (((0, 4),), "microbatch 4 is in 1 pairs, and 4 microbatches are there"),
        (((1, 0), (2, 3)), "the later one comes first"),
        (((0, 3),), "does not stand beside"),
    ],
)
def test_checker_when_pairs_cannot_run_side_by_side_then_reports_it(pairs, problem):
    assert any(problem in found for found in violations(replace(paired(), pairs=pairs)))
    assert violations(replace(paired(), pairs=((0, 1),))) == []


@pytest.mark.parametrize("index", [1, 3])
def test_checker_when_something_comes_between_a_pair_then_reports_it(index):
    program = paired()
    own = list(program.stages[0])
    own[index], own[index + 1] = own[index + 1], own[index]
    found = violations(replace(program, stages=(tuple(own),)))
    assert any("does not stand beside" in text for text in found)


def test_checker_when_a_microbatch_of_a_pair_is_empty_then_reports_it():
    program = Program((paired().microbatches[0], Microbatch(())), paired().stages, pairs=((0, 1),))
    assert any("one of them is empty" in found for found in violations(program))


def test_program_when_its_pairs_are_no_pairs_then_is_none():
    with pytest.raises(PlanError, match="this is not a program"):
        Program.from_json(paired().to_json() | {"pairs": [[0, 1, 2]]})
