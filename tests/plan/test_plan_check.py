"""A program that would train anything else than each job's own order is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weft.plan.check import violations
from weft.plan.pack import pack
from weft.plan.program import Backward, Forward, Instruction, Program, Step
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment

CAPACITY = 16
LIMITS = Limits(CAPACITY, 100)
Position = tuple[int, int]
Part = Microbatch | Step
"""What one device does: a microbatch, forward and at once backward, or a step."""


@st.composite
def planned(draw: st.DrawFn) -> tuple[list[JobQueue], list[Part]]:
    """Queues and all parts of the program for them."""
    sizes = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=4)
    queues = []
    for i in range(draw(st.integers(1, 3))):
        lists = draw(st.lists(sizes, min_size=1, max_size=3))
        first = draw(st.integers(0, 2))
        batches = [Batch(s, first if s == 0 else 0, tuple(lengths)) for s, lengths in enumerate(lists)]
        queues.append(JobQueue(f"job{i}", tuple(batches), True))
    return queues, parts_of(pack(queues, LIMITS))


def parts_of(program: Program) -> list[Part]:
    parts: list[Part] = []
    for turn in program.turns:
        parts += [turn.microbatch] if turn.microbatch.segments else []
        parts += turn.steps
    return parts


def program_of(parts: list[Part]) -> Program:
    """The program of one device that does this, sound or not."""
    microbatches = [part for part in parts if isinstance(part, Microbatch)]
    instructions: list[Instruction] = []
    num_before = 0
    for part in parts:
        if isinstance(part, Step):
            instructions.append(part)
        else:
            instructions += [Forward(num_before), Backward(num_before)]
            num_before += 1
    return Program(tuple(microbatches), (tuple(instructions),))


def segments_of(instructions: list[Part]) -> list[Position]:
    """(instruction, segment) of every segment."""
    return [
        (i, j)
        for i, instruction in enumerate(instructions)
        if isinstance(instruction, Microbatch)
        for j in range(len(instruction.segments))
    ]


def steps_of(instructions: list[Part]) -> list[int]:
    return [i for i, instruction in enumerate(instructions) if isinstance(instruction, Step)]


def segment_at(instructions: list[Part], position: Position) -> Segment:
    instruction = instructions[position[0]]
    assert isinstance(instruction, Microbatch)
    return instruction.segments[position[1]]


def replaced(instructions: list[Part], position: Position, *segments: Segment) -> list[Part]:
    """The program with other segments (or none) in one position; a microbatch left empty goes."""
    i, j = position
    old = instructions[i]
    assert isinstance(old, Microbatch)
    new = (*old.segments[:j], *segments, *old.segments[j + 1 :])
    middle: list[Part] = [Microbatch(new)] if new else []
    return [*instructions[:i], *middle, *instructions[i + 1 :]]


def is_caught(queues: list[JobQueue], instructions: list[Part], limits: Limits = LIMITS) -> bool:
    return bool(violations(program_of(instructions), queues, limits))


@given(planned())
def test_program_when_unchanged_then_accepted(plan):
    assert not is_caught(*plan)


@given(planned(), st.data())
def test_program_when_cut_short_after_a_step_then_accepted(plan, data):
    """A program may end anywhere, as long as no step that is due is missing."""
    queues, instructions = plan
    end = data.draw(st.sampled_from(steps_of(instructions))) + 1
    rest = instructions[end:]
    assume(not rest or isinstance(rest[0], Microbatch))
    assert not is_caught(queues, instructions[:end])


@given(planned(), st.data())
def test_program_when_a_segment_is_dropped_then_caught(plan, data):
    queues, instructions = plan
    position = data.draw(st.sampled_from(segments_of(instructions)))
    assert is_caught(queues, replaced(instructions, position))


@given(planned(), st.data())
def test_program_when_a_segment_comes_twice_then_caught(plan, data):
    queues, instructions = plan
    position = data.draw(st.sampled_from(segments_of(instructions)))
    again = segment_at(instructions, position)
    roomy = Limits(10 * CAPACITY)
    assert is_caught(queues, replaced(instructions, position, again, again), roomy)


@given(planned(), st.data())
def test_program_when_two_segments_of_a_job_swap_then_caught(plan, data):
    queues, instructions = plan
    owned = [(position, segment_at(instructions, position).job) for position in segments_of(instructions)]
    pairs = [(p, q) for p, mine in owned for q, other in owned if p < q and mine == other]
    assume(pairs)
    p, q = data.draw(st.sampled_from(pairs))
    first, second = segment_at(instructions, p), segment_at(instructions, q)
    swapped = replaced(replaced(instructions, p, second), q, first)
    assert is_caught(queues, swapped, Limits(10 * CAPACITY))


@given(planned(), st.data())
def test_program_when_a_step_is_dropped_then_caught(plan, data):
    queues, instructions = plan
    position = data.draw(st.sampled_from(steps_of(instructions)))
    assert is_caught(queues, instructions[:position] + instructions[position + 1 :])


@given(planned(), st.data())
def test_program_when_a_step_comes_twice_then_caught(plan, data):
    queues, instructions = plan
    position = data.draw(st.sampled_from(steps_of(instructions)))
    assert is_caught(queues, [*instructions[: position + 1], *instructions[position:]])


@given(planned(), st.data())
def test_program_when_a_step_comes_before_its_last_sample_then_caught(plan, data):
    queues, instructions = plan
    position = data.draw(st.sampled_from(steps_of(instructions)))
    step = instructions[position]
    assert isinstance(step, Step)
    own = [i for i, j in segments_of(instructions[:position]) if segment_at(instructions, (i, j)).job == step.job]
    earlier = data.draw(st.integers(0, max(own)))
    rest = instructions[:position] + instructions[position + 1 :]
    assert is_caught(queues, [*rest[:earlier], step, *rest[earlier:]])


@given(planned(), st.data())
def test_program_when_a_step_comes_after_the_next_global_batch_began_then_caught(plan, data):
    queues, instructions = plan
    late = [
        (position, i + 1)
        for position in steps_of(instructions)
        for i, j in segments_of(instructions)
        if i > position and segment_at(instructions, (i, j)).job == instructions[position].job
    ]
    assume(late)
    position, later = data.draw(st.sampled_from(late))
    step = instructions[position]
    moved = [*instructions[:position], *instructions[position + 1 : later], step, *instructions[later:]]
    assert is_caught(queues, moved)


@given(planned(), st.data())
def test_program_when_a_step_has_another_number_then_caught(plan, data):
    queues, instructions = plan
    position = data.draw(st.sampled_from(steps_of(instructions)))
    step = instructions[position]
    other = Step(step.job, step.step + data.draw(st.sampled_from([-1, 1, 7])))
    assert is_caught(queues, [*instructions[:position], other, *instructions[position + 1 :]])


@given(planned(), st.data())
def test_program_when_a_microbatch_is_over_capacity_then_caught(plan, data):
    queues, instructions = plan
    fullest = max(i.num_tokens for i in instructions if isinstance(i, Microbatch))
    tight = Limits(fullest - 1) if fullest > 1 else Limits(0)
    assert is_caught(queues, instructions, tight)


@given(planned(), st.data())
def test_program_when_a_segment_has_another_length_then_caught(plan, data):
    queues, instructions = plan
    position = data.draw(st.sampled_from(segments_of(instructions)))
    segment = segment_at(instructions, position)
    wrong = dataclasses.replace(segment, length=segment.length + data.draw(st.sampled_from([-1, 1])))
    assert is_caught(queues, replaced(instructions, position, wrong), Limits(10 * CAPACITY))


@given(planned(), st.data())
def test_program_when_a_segment_belongs_to_another_job_then_caught(plan, data):
    queues, instructions = plan
    position = data.draw(st.sampled_from(segments_of(instructions)))
    segment = segment_at(instructions, position)
    names = [q.job for q in queues if q.job != segment.job]
    stranger = dataclasses.replace(segment, job=data.draw(st.sampled_from(["stranger", *names])))
    assert is_caught(queues, replaced(instructions, position, stranger))


@pytest.mark.parametrize(
    "extra",
    [
        Step("stranger", 0),
        Microbatch(()),
        Microbatch((Segment("stranger", 0, 0, 1),)),
        Microbatch((Segment("a", 1, 0, 1),)),
    ],
    ids=["strange step", "empty microbatch", "strange segment", "past the end"],
)
def test_program_when_it_holds_something_unasked_then_caught(extra):
    queues = [JobQueue("a", (Batch(0, 0, (3,)),), True)]
    whole = [Microbatch((Segment("a", 0, 0, 3),)), Step("a", 0)]
    assert not is_caught(queues, whole)
    assert is_caught(queues, [*whole, extra])
    assert is_caught(queues, [extra, *whole])


def test_program_when_a_due_step_is_ignored_then_caught():
    queues = [JobQueue("a", (Batch(4, 2, ()), Batch(5, 0, (3,))), True)]
    goes_on = [Microbatch((Segment("a", 5, 0, 3),)), Step("a", 5)]
    assert not is_caught(queues, [Step("a", 4), *goes_on])
    assert is_caught(queues, [])
    assert is_caught(queues, goes_on)
    assert is_caught(queues, [Step("a", 5)])


def test_backwards_when_not_in_the_jobs_order_then_caught():
    """Gradients are summed in the order of the backwards, so an adapter's bits would change."""
    queues = [JobQueue("a", (Batch(0, 0, (3, 4)),), True), JobQueue("b", (Batch(0, 0, (5,)),), True)]
    microbatches = tuple(Microbatch((Segment(*fields),)) for fields in (("a", 0, 0, 3), ("b", 0, 0, 5), ("a", 0, 1, 4)))
    steps = [Step("a", 0), Step("b", 0)]

    def found(*order: int) -> list[str]:
        forwards = [Forward(k) for k in range(3)]
        return violations(Program(microbatches, ((*forwards, *map(Backward, order), *steps),)), queues, LIMITS)

    assert found(0, 1, 2) == found(1, 0, 2) == found(0, 2, 1) == []
    assert all("follow its own" in problem for problem in [*found(2, 1, 0), *found(1, 2, 0)])
    assert len(found(2, 0, 1)) == 1
