"""Programs that go on: whatever is appended is a valid program, in order, and idles no longer than one that drains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_streams import streams

from weft.plan.check import stuck, violations
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.append import ContinuedProgram, DealtStream, Lists, joined, joined_all
from weft.plan.pipeline.build import Schedule, build
from weft.plan.pipeline.orders import open_pipe
from weft.plan.program import Forward, Instruction, Measure, Program, Receive, Send, Step
from weft.plan.simulate.interpret import simulate
from weft.plan.spread import SpreadPlanner
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment

COST = LinearCost(fixed_s=1.0)


def later(stream: list[Microbatch], by: int) -> list[Microbatch]:
    """The same samples as global batches that come so many steps later."""
    return [Microbatch(tuple(replace(s, step=s.step + by) for s in m.segments)) for m in stream]


def several(drawn: list[list[Microbatch]]) -> list[list[Microbatch]]:
    return [later(stream, 10 * index) for index, stream in enumerate(drawn)]


def singles(*named: str) -> list[Microbatch]:
    """A microbatch for each sample, which is called by its job, its step, its number and its length: a501."""
    return [Microbatch((Segment(name[0], *map(int, name[1:])),)) for name in named]


OLDER_STEP_DUE_WITH_A_NEWER = [
    singles("a501"),
    singles("a501", "a511", "a521", "b501", "c501", "b511", "b521", "b601", "b611", "b622"),
    [*singles("a501"), Microbatch((Segment("a", 6, 0, 1), Segment("b", 5, 0, 1)))],
]
"""The last microbatch comes after a step of its own program and one of the program before."""


@settings(max_examples=25, deadline=None)
@example(OLDER_STEP_DUE_WITH_A_NEWER, 2)
@given(st.lists(streams(), min_size=1, max_size=3), st.integers(2, 4))
def test_streams_when_joined_then_are_one_valid_program(drawn: list[list[Microbatch]], num_stages: int) -> None:
    """And the simulator runs it to its end."""
    parts = several(drawn)
    memory = [2 * 9 * 4 * num_stages] * num_stages
    whole = joined(parts, num_stages, COST, memory_bytes=memory)
    assert violations(whole, cost=COST, memory_bytes=memory) == []
    simulate(whole, COST)


@settings(max_examples=25, deadline=None)
@given(st.lists(streams(), min_size=1, max_size=3), st.integers(2, 4))
def test_lists_when_sent_then_none_waits_for_what_has_not_been_sent(
    drawn: list[list[Microbatch]], num_stages: int
) -> None:
    """So a stage is never caught in the middle of what it knows."""
    endless, lists, microbatches = ContinuedProgram(open_pipe(num_stages)), [()] * num_stages, list[Microbatch]()
    for index, stream in enumerate(several(drawn)):
        lists = add(lists, endless.append(DealtStream(stream, [range(len(stream))]), [(COST, None)]))
        microbatches += stream
        assert list(stuck(Program(tuple(microbatches), tuple(lists)))) == []
        assert not endless.is_issued(index)
    lists = add(lists, endless.end())
    assert endless.is_issued(len(drawn) - 1)
    assert tuple(lists) == joined(several(drawn), num_stages, COST).stages


def add(before: list[tuple], more: Lists) -> list[tuple]:
    return [(*first, *own) for first, own in zip(before, more, strict=True)]


def without_steps(instructions: Sequence[Instruction]) -> list[Instruction]:
    return [i for i in instructions if not isinstance(i, Step)]


def test_program_when_another_follows_then_the_first_stage_begins_it_before_it_has_gone_back() -> None:
    """Other jobs: as if both were one long program, whereas drained they take longer."""
    parts = [[Microbatch((Segment(job, 0, k, 4),)) for k in range(8)] for job in ("a", "b")]
    whole = joined(parts, 4, COST)
    one_long = build(Schedule.EAGER, [m for part in parts for m in part], 4, cost=COST)
    assert [without_steps(own) for own in whole.stages] == [without_steps(own) for own in one_long.stages]
    first = [i for i in whole.stages[0] if not isinstance(i, Send | Receive)]
    last_of_first = max(index for index, i in enumerate(first) if getattr(i, "microbatch", 99) == 7)
    assert first.index(Forward(8)) < last_of_first
    drained_s = sum(simulate(build(Schedule.EAGER, part, 4, cost=COST), COST).makespan_s for part in parts)
    assert simulate(whole, COST).makespan_s < 0.9 * drained_s


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.integers(1, 3), min_size=2, max_size=3))
def test_programs_of_several_replicas_when_appended_then_no_list_waits_for_what_has_not_been_sent(data, sizes):
    """Jobs at home and jobs that are spread; they come, end and stay, and replicas are unlike."""
    costs = tuple(LinearCost(fixed_s=data.draw(st.sampled_from([0.0, 5.0])), token_s=1 / size) for size in sizes)
    planner, pipes = SpreadPlanner(tuple(sizes), costs), [open_pipe(size, max_lead=[2 * size] * size) for size in sizes]
    endless, lists = ContinuedProgram(*pipes), [()] * sum(sizes)
    whole: dict[str, JobQueue] = {}
    given, microbatches, measuring = list[DealtStream](), list[Microbatch](), dict[Measure, tuple[int, ...]]()
    next_step: dict[str, int] = {}
    homes = {name: data.draw(st.one_of(st.none(), st.integers(0, len(sizes) - 1))) for name in "abcd"}
    for _ in range(data.draw(st.integers(1, 4))):
        names = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
        queues = [drawn_queue(data, name, next_step.get(name, 0), homes[name]) for name in sorted(names)]
        next_step |= {queue.job: queue.batches[-1].step + 1 for queue in queues}
        for queue in queues:
            before = whole[queue.job].batches if queue.job in whole else ()
            whole[queue.job] = replace(queue, batches=(*before, *queue.batches))
        program = planner(queues, Limits(64, 99))
        given.append(DealtStream.of(program))
        microbatches += program.microbatches
        lists = add(lists, endless.append(given[-1], [(cost, None) for cost in costs]))
        measuring |= program.measuring
        so_far = Program(tuple(microbatches), tuple(lists), replica_sizes=tuple(sizes))
        # A stage that measures before the deciding one is due to waits for no other.
        sent = {of for of, stages in so_far.measuring.items() if stages[0] != measuring[of][0]}
        waiting = tuple(tuple(i for i in own if i not in sent) for own in lists)
        assert list(stuck(replace(so_far, stages=waiting))) == []
        for step in (i for own in lists for i in own if isinstance(i, Step)):
            assert so_far.measuring[of := Measure(step.job, step.step)] == measuring[of], (
                "no job steps without a decision"
            )
    lists = add(lists, endless.end())
    assert all(endless.is_issued(index) for index in range(len(given)))
    found = joined_all(given, pipes, [(cost, None) for cost in costs])
    assert tuple(lists) == found.stages
    assert violations(found, list(whole.values()), Limits(64, 99)) == []
    assert simulate(found, costs).makespan_s > 0


def test_replica_when_it_has_no_part_of_the_next_program_then_gets_the_end_of_the_one_before() -> None:
    """Otherwise that one could not be counted before the replica has jobs again."""
    planner, endless = SpreadPlanner((2, 2), (COST, COST)), ContinuedProgram(open_pipe(2), open_pipe(2))
    queues = [JobQueue(name, (Batch(0, 0, (9,) * 4),), is_all=True, home=home) for home, name in enumerate("ab")]
    endless.append(DealtStream.of(planner(queues, Limits(9))), [(COST, None)] * 2)
    longer = replace(queues[0], batches=(Batch(1, 0, (9,) * 9), Batch(2, 0, (9,) * 9)))
    endless.append(DealtStream.of(planner([longer], Limits(9))), [(COST, None)] * 2)
    assert endless.is_issued(0) and not endless.is_issued(1)


def drawn_queue(data: st.DataObject, name: str, first: int, home: int | None) -> JobQueue:
    lengths = st.lists(st.integers(1, 60), min_size=1, max_size=5)
    batches = tuple(Batch(first + n, 0, tuple(data.draw(lengths))) for n in range(data.draw(st.integers(1, 3))))
    return JobQueue(name, batches, is_all=True, home=home)
