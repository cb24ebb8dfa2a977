"""Programs that go on: whatever is appended is a valid program, in order, and idles no longer than one that drains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_streams import streams

from weft.cost.types import LinearCost
from weft.plan.check import violations
from weft.plan.check.between import stuck
from weft.plan.pipeline.append import EndlessProgram, Lists, joined
from weft.plan.pipeline.build import Schedule, build
from weft.plan.program import Forward, Instruction, Program, Receive, Send, Step
from weft.plan.types import Microbatch, Segment
from weft.simulate.interpret import simulate

COST = LinearCost(fixed_s=1.0)


def later(stream: list[Microbatch], by: int) -> list[Microbatch]:
    """The same samples as global batches that come so many steps later."""
    return [Microbatch(tuple(replace(s, step=s.step + by) for s in m.segments)) for m in stream]


def several(drawn: list[list[Microbatch]]) -> list[list[Microbatch]]:
    return [later(stream, 10 * place) for place, stream in enumerate(drawn)]


def singles(*named: str) -> list[Microbatch]:
    """A microbatch for each sample, which is called by its job, its step, its number and its length: a501."""
    return [Microbatch((Segment(name[0], *map(int, name[1:])),)) for name in named]


OLDER_STEP_ASKED_FOR_WITH_A_NEWER = [
    singles("a501"),
    singles("a501", "a511", "a521", "b501", "c501", "b511", "b521", "b601", "b611", "b622"),
    [*singles("a501"), Microbatch((Segment("a", 6, 0, 1), Segment("b", 5, 0, 1)))],
]
"""The last microbatch is behind a step of its own program and one of the program before."""


@settings(max_examples=25, deadline=None)
@example(OLDER_STEP_ASKED_FOR_WITH_A_NEWER, 2)
@given(st.lists(streams(), min_size=1, max_size=3), st.integers(2, 4))
def test_streams_when_joined_then_are_one_valid_program(drawn: list[list[Microbatch]], num_stages: int) -> None:
    """And the simulator runs it to its end."""
    parts = several(drawn)
    memory = [2 * 9 * 4 * num_stages] * num_stages
    whole = joined(parts, num_stages, COST, memory_bytes=memory)
    assert violations(whole, cost=COST, memory_bytes=memory) == []
    simulate(whole, COST)
    order = [i.step // 10 for i in whole.stages[-1] if isinstance(i, Step)]
    assert order == sorted(order), "all steps of a program come before those of the next"


@settings(max_examples=25, deadline=None)
@given(st.lists(streams(), min_size=1, max_size=3), st.integers(2, 4))
def test_lists_when_told_then_none_waits_for_what_has_not_been_told(
    drawn: list[list[Microbatch]], num_stages: int
) -> None:
    """So a stage is never caught in the middle of what it knows."""
    endless, told, microbatches = EndlessProgram(num_stages), [()] * num_stages, list[Microbatch]()
    for place, stream in enumerate(several(drawn)):
        told = add(told, endless.append(stream, COST))
        microbatches += stream
        assert list(stuck(Program(tuple(microbatches), tuple(told)))) == []
        assert not endless.has_told(place)
    told = add(told, endless.end())
    assert endless.has_told(len(drawn) - 1)
    assert tuple(told) == joined(several(drawn), num_stages, COST).stages


def add(told: list[tuple], lists: Lists) -> list[tuple]:
    return [(*before, *own) for before, own in zip(told, lists, strict=True)]


def without_steps(instructions: Sequence[Instruction]) -> list[Instruction]:
    return [i for i in instructions if not isinstance(i, Step)]


def test_program_when_another_follows_then_the_first_stage_begins_it_before_it_has_gone_back() -> None:
    """Other jobs: as if both were one long program, whereas drained they take longer."""
    parts = [[Microbatch((Segment(job, 0, k, 4),)) for k in range(8)] for job in ("a", "b")]
    whole = joined(parts, 4, COST)
    one_long = build(Schedule.EAGER, [m for part in parts for m in part], 4, cost=COST)
    assert [without_steps(own) for own in whole.stages] == [without_steps(own) for own in one_long.stages]
    first = [i for i in whole.stages[0] if not isinstance(i, Send | Receive)]
    last_of_first = max(place for place, i in enumerate(first) if getattr(i, "microbatch", 99) == 7)
    assert first.index(Forward(8)) < last_of_first
    drained_s = sum(simulate(build(Schedule.EAGER, part, 4, cost=COST), COST).makespan_s for part in parts)
    assert simulate(whole, COST).makespan_s < 0.9 * drained_s
