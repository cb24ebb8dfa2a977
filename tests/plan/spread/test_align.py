"""Devices that share frozen weights run their passes at the same time, and none waits for ever."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from test_spread_planner import LIMITS, job, queues

from weft.plan.check import violations
from weft.plan.cost.types import LinearCost
from weft.plan.program import Backward, Forward, Program
from weft.plan.simulate.interpret import simulate
from weft.plan.spread import SpreadPlanner
from weft.plan.types import JobQueue


def planner(shards: Sequence[int], stages: Sequence[int] | None = None, **cost: float) -> SpreadPlanner:
    """Of copies of the frozen weights that are shared by so many replicas, each of so many stages."""
    each = zip(shards, stages or [1] * len(shards), strict=True)
    sizes = tuple(size for count, size in each for _ in range(count))
    return SpreadPlanner(sizes, (LinearCost(**cost),) * len(sizes), shards=tuple(shards))


def plan(own: list[JobQueue], count: int) -> Program:
    return planner([count])(own, LIMITS)


def directions(program: Program, stage: int) -> list[type]:
    return [type(i) for i in program.stages[stage] if isinstance(i, Forward | Backward)]


def rounds(program: Program) -> list[list[int]]:
    """Tokens that each device has, round by round."""
    lists = [[i.microbatch for i in own if isinstance(i, Forward)] for own in program.stages]
    return [[program.microbatches[k].num_tokens for k in together] for together in zip(*lists, strict=True)]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
def test_program_when_weights_are_shared_then_passes_the_checker_and_comes_to_its_end(data, layout):
    """Whatever jobs are spread or at home, on copies that are shared or not, in stages or not: stages of the same
    layers go in the same directions, in every round some device has samples, and microbatches stay as they were."""
    shards, stages = zip(*layout, strict=True)
    if sum(shards) * max(stages) == 1:
        return
    given = planner(shards, stages, fixed_s=data.draw(st.sampled_from([0.0, 5.0])))
    own = data.draw(queues(sum(shards)))
    program = given(own, LIMITS)
    assert violations(program, own, LIMITS) == []
    assert simulate(program, given.costs).makespan_s > 0
    for ring in program.rings:
        assert len({tuple(directions(program, stage)) for stage in ring}) == 1
        forwards = [[i.microbatch for i in program.stages[stage] if isinstance(i, Forward)] for stage in ring]
        assert all(any(program.microbatches[k].segments for k in own) for own in zip(*forwards, strict=True))
    apart = dataclasses.replace(given, shards=())(own, LIMITS)
    assert Counter(m for m in program.microbatches if m.segments) == Counter(apart.microbatches)
    assert Program.from_json(program.to_json()) == program


def test_rings_when_replicas_in_stages_share_weights_then_are_the_stages_with_the_same_layers():
    program = planner([1, 2, 2], [1, 2, 1])([job("a", 40, home=1)], LIMITS)
    assert program.replicas == (range(1), range(1, 3), range(3, 5), range(5, 6), range(6, 7))
    assert program.rings == ((1, 3), (2, 4), (5, 6))
    assert not program.stages[0] and not program.stages[5]


def test_device_without_jobs_then_runs_as_many_microbatches_as_the_others():
    program = plan([job("a", 40, 30, home=0), job("b", 20, home=1, steps=1)], 3)
    found = rounds(program)
    assert len(found) == max(sum(1 for own in found if own[k]) for k in range(3))
    assert all(own[2] == 0 for own in found)
    for instructions in program.stages:
        visits = [i for i in instructions if isinstance(i, Forward | Backward)]
        assert [type(i) for i in visits] == [Forward, Backward] * len(found)


def test_simulation_when_devices_are_in_step_then_a_round_takes_as_long_as_its_slowest():
    """Alone, each device would be done sooner."""
    own = [job(name, length, home=home, steps=1) for name, length, home in (("a", 40, 0), ("b", 30, 0), ("c", 30, 1))]
    program = plan([*own, job("d", 40, home=1, steps=1)], 2)
    assert rounds(program) == [[40, 30], [30, 40]]
    assert simulate(program, LinearCost()).makespan_s == 2 * (40 + 40)
    apart = dataclasses.replace(program, shards=())
    assert simulate(apart, LinearCost()).makespan_s == 2 * (40 + 30)


def test_checker_when_a_device_is_out_of_step_then_reports_it():
    """One without its last microbatch, and a program that waits for a step of one that has to run first."""
    own = [job("a", 40, 30, home=0), job("b", 20, home=1, steps=1)]
    program = plan(own, 2)
    first, second = program.stages
    k = max(i.microbatch for i in second if isinstance(i, Forward))
    assert not program.microbatches[k].segments
    shorter = tuple(i for i in second if getattr(i, "microbatch", None) != k)
    wrong = dataclasses.replace(program, stages=(first, shorter), microbatches=program.microbatches[:k])
    assert "stage 0 waits for ever at Forward" in "; ".join(violations(wrong, own, LIMITS))
    assert violations(dataclasses.replace(wrong, shards=()), own, LIMITS) == []


def test_checker_when_stages_of_the_same_layers_go_in_other_directions_then_reports_it():
    own = [job("a", 40, 40, home=0, steps=1), job("b", 50, 50, home=1, steps=1)]
    program = plan(own, 2)
    first, second = program.stages
    passes = [i for i in first if isinstance(i, Forward | Backward)]
    assert directions(program, 0) == [Forward, Backward] * 2
    turned = (passes[0], passes[2], passes[1], passes[3], *(i for i in first if i not in passes))
    wrong = dataclasses.replace(program, stages=(turned, second))
    assert violations(dataclasses.replace(wrong, shards=()), own, LIMITS) == []
    found = "; ".join(violations(wrong, own, LIMITS))
    assert "stage 0 waits for ever at Forward" in found and "stage 1 waits for ever at Backward" in found


def test_checker_when_those_that_are_to_share_weights_are_not_there_then_reports_it():
    own = [job("a", 40, 30, home=0), job("b", 20, home=1)]
    program = planner([2], [2])(own, LIMITS)
    assert "shards of (2, 1) replicas are not those" in violations(dataclasses.replace(program, shards=(2, 1)))[0]
    unlike = planner([1, 1], [1, 2])(own, LIMITS)
    assert "shards of (2,) replicas are not those" in violations(dataclasses.replace(unlike, shards=(2,)))[0]
