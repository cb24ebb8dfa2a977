"""Whatever is waiting, a packed program is valid, full, fair and the same each time."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from weft.plan.check import violations
from weft.plan.pack import pack
from weft.plan.program import Program, Step, Turn
from weft.plan.types import Batch, JobQueue, Limits, Segment

CAPACITY = 24


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, ...]:
    """Global batches of one job; the first may be partly done, or wait for nothing but its step."""
    step = draw(st.integers(0, 5))
    sizes = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=6)
    first = draw(st.integers(0, 3))
    lengths = draw(st.one_of(st.just([]), sizes)) if first else draw(sizes)
    others = draw(st.lists(sizes, max_size=3))
    return (
        Batch(step, first, tuple(lengths)),
        *(Batch(step + 1 + i, 0, tuple(more)) for i, more in enumerate(others)),
    )


@st.composite
def waiting(draw: st.DrawFn, max_jobs: int = 5) -> list[JobQueue]:
    return [
        JobQueue(
            f"job{i}",
            draw(batches()),
            draw(st.booleans()),
            draw(st.integers(-1, 1)),
            draw(st.integers(0, 50)),
        )
        for i in range(draw(st.integers(1, max_jobs)))
    ]


LIMITS = st.builds(Limits, st.just(CAPACITY), st.integers(1, 12))


class Replay:
    """Follows a program and knows what each job could have given to the microbatch at hand."""

    def __init__(self, queues: list[JobQueue]) -> None:
        self.queues = {q.job: q for q in queues}
        self.done = dict.fromkeys(self.queues, 0)
        self.steps = {q.job: q.batches[0].step for q in queues}

    def next_segment(self, job: str) -> Segment | None:
        """The next sample of a job, if its global batch may go on now."""
        for batch in self.queues[job].batches:
            if batch.step == self.steps[job] and self.done[job] < len(batch.lengths):
                return Segment(job, batch.step, batch.first + self.done[job], batch.lengths[self.done[job]])
        return None

    def run(self, turn: Turn) -> None:
        for segment in turn.microbatch.segments:
            self.done[segment.job] += 1

    def take_steps(self, turn: Turn) -> None:
        for step in turn.steps:
            self.steps[step.job] += 1
            self.done[step.job] = 0


def steps_of(program: Program) -> set[Step]:
    return {step for turn in program.turns for step in turn.steps}


def is_complete(queues: list[JobQueue], program: Program) -> bool:
    return {Step(q.job, b.step) for q in queues for b in q.batches} == steps_of(program)


@given(waiting(), LIMITS)
def test_pack_when_any_queues_then_program_has_no_violation(queues, limits):
    assert violations(pack(queues, limits), queues, limits) == []


@given(waiting(), LIMITS)
def test_pack_when_any_queues_then_repeats_itself(queues, limits):
    assert pack(queues, limits) == pack(queues, limits)


@given(waiting(), LIMITS)
def test_pack_when_it_returns_then_no_microbatch_could_take_another_sample(queues, limits):
    replay = Replay(queues)
    for turn in pack(queues, limits).turns:
        replay.run(turn)
        if turn.microbatch.segments:
            free = limits.capacity - turn.microbatch.num_tokens
            left = [replay.next_segment(job) for job in replay.queues]
            assert all(segment.length > free for segment in left if segment is not None)
        replay.take_steps(turn)


@given(waiting(), LIMITS)
def test_pack_when_jobs_differ_in_priority_then_none_waits_for_a_lower_one(queues, limits):
    """What the jobs of lower priority took would not have been enough for the sample left out."""
    replay = Replay(queues)
    priority = {q.job: q.priority for q in queues}
    for turn in pack(queues, limits).turns:
        replay.run(turn)
        microbatch = turn.microbatch
        if microbatch.segments:
            for job, segment in ((job, replay.next_segment(job)) for job in priority):
                below = sum(s.length for s in microbatch.segments if priority[s.job] < priority[job])
                free = limits.capacity - microbatch.num_tokens
                assert segment is None or not below or segment.length > free + below
        replay.take_steps(turn)


def test_pack_when_a_high_job_fills_the_microbatch_then_a_low_one_waits():
    lengths = (8, 8, 8)
    queues = [JobQueue(name, (Batch(0, 0, lengths),), True, priority) for name, priority in (("low", 0), ("high", 1))]
    assert [s.job for s in pack(queues, Limits(24)).microbatches[0].segments] == ["high"] * 3


@given(waiting(), LIMITS)
def test_pack_when_a_step_is_due_then_it_comes_first(queues, limits):
    due = {Step(q.job, q.batches[0].step) for q in queues if not q.batches[0].lengths}
    assert set(pack(queues, limits).stages[0][: len(due)]) == due


@given(waiting(), LIMITS)
def test_pack_when_a_global_batch_is_complete_then_its_step_follows_at_once(queues, limits):
    last = {(q.job, b.step): b.first + len(b.lengths) - 1 for q in queues for b in q.batches}
    for turn in pack(queues, limits).turns:
        ended = [s for s in turn.microbatch.segments if s.index == last[s.job, s.step]]
        if turn.microbatch.segments:
            assert {Step(s.job, s.step) for s in ended} == set(turn.steps) and len(ended) == len(turn.steps)


@given(waiting(), LIMITS)
def test_pack_when_it_stops_then_for_one_of_three_reasons(queues, limits):
    """Everything is planned, the program is long enough, or a job may have more than it listed."""
    program = pack(queues, limits)
    stepped = steps_of(program)
    ran_out = [q for q in queues if not q.is_all and all(Step(q.job, b.step) in stepped for b in q.batches)]
    assert len(program.microbatches) <= limits.max_microbatches
    assert len(program.microbatches) == limits.max_microbatches or ran_out or is_complete(queues, program)


@given(waiting(), LIMITS)
def test_pack_when_a_job_is_left_out_then_the_shares_of_those_served_less_left_no_room(queues, limits):
    """No job takes more than an equal share, or one sample, while an equal still waits for its first."""
    queues = [dataclasses.replace(q, priority=0) for q in queues]
    replay = Replay(queues)
    served = {q.job: q.served_tokens for q in queues}
    for turn in pack(queues, limits).turns:
        if turn.microbatch.segments:
            lengths = {job: s.length for job in served if (s := replay.next_segment(job)) is not None}
            line = sorted(lengths, key=lambda job: (served[job], job))
            share = limits.capacity // len(line)
            for index, job in enumerate(line):
                if not any(s.job == job for s in turn.microbatch.segments):
                    before = sum(max(share, lengths[other]) for other in line[:index])
                    assert lengths[job] + before > limits.capacity
            for segment in turn.microbatch.segments:
                served[segment.job] += segment.length
        replay.run(turn)
        replay.take_steps(turn)


@given(st.integers(2, 5), st.integers(1, 24))
def test_pack_when_equals_have_samples_of_one_length_then_service_stays_even(num_jobs, length):
    queues = [JobQueue(f"job{i}", (Batch(0, 0, (length,) * 400),), True) for i in range(num_jobs)]
    served = dict.fromkeys((q.job for q in queues), 0)
    for microbatch in pack(queues, Limits(CAPACITY, 15)).microbatches:
        for segment in microbatch.segments:
            served[segment.job] += segment.length
        assert max(served.values()) - min(served.values()) <= CAPACITY


def test_pack_when_several_jobs_fit_then_each_is_in_the_microbatch():
    queues = [JobQueue(f"job{i}", (Batch(0, 0, (4,) * 50),), True) for i in range(6)]
    for microbatch in pack(queues, Limits(CAPACITY, 8)).microbatches:
        assert {s.job for s in microbatch.segments} == {q.job for q in queues}


def test_pack_when_one_was_served_less_then_it_goes_first():
    queues = [JobQueue(name, (Batch(0, 0, (CAPACITY,)),), True, 0, served) for name, served in (("a", 9), ("b", 3))]
    assert [m.segments[0].job for m in pack(queues, Limits(CAPACITY)).microbatches] == ["b", "a"]


def test_pack_when_a_sample_is_as_long_as_the_capacity_then_it_is_alone():
    queues = [JobQueue("a", (Batch(0, 0, (CAPACITY, 1)),), True), JobQueue("b", (Batch(0, 0, (1,)),), True, 1)]
    sizes = [m.num_tokens for m in pack(queues, Limits(CAPACITY)).microbatches]
    assert sorted(sizes) in ([1, CAPACITY, 1], [1, 1, CAPACITY], [2, CAPACITY])


def test_pack_when_nothing_waits_then_program_is_empty():
    assert pack([], Limits(CAPACITY)) == Program((), ((),))
    assert pack([JobQueue("a", (), True)], Limits(CAPACITY)) == Program((), ((),))
