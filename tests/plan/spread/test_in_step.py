"""Devices that share frozen weights run their microbatches at the same time, and nobody waits for ever."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from test_spread_planner import LIMITS, job, queues

from weft.cost.types import LinearCost
from weft.plan.check import violations
from weft.plan.program import Backward, Forward, Program
from weft.plan.spread.in_step import InStepPlanner, in_step
from weft.plan.spread.planner import SpreadPlanner
from weft.plan.types import JobQueue
from weft.simulate.interpret import simulate


def plan(own: list[JobQueue], count: int, costs: tuple[LinearCost, ...] | None = None) -> Program:
    given_costs = costs or (LinearCost(),) * count
    return InStepPlanner(SpreadPlanner((1,) * count, given_costs))(own, LIMITS)


def rounds(program: Program) -> list[list[int]]:
    """Tokens that each device has, round by round."""
    lists = [[i.microbatch for i in own if isinstance(i, Forward)] for own in program.stages]
    return [[program.microbatches[k].num_tokens for k in together] for together in zip(*lists, strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(2, 4))
def test_program_when_brought_into_step_then_passes_the_checker(data, count):
    """Whatever jobs are spread or at home; in every round somebody has samples, and microbatches stay as they were."""
    own = data.draw(queues(count))
    costs = tuple(LinearCost(fixed_s=data.draw(st.sampled_from([0.0, 5.0]))) for _ in range(count))
    program = plan(own, count, costs)
    assert violations(program, own, LIMITS) == []
    assert all(any(together) for together in rounds(program))
    before = SpreadPlanner((1,) * count, costs)(own, LIMITS)
    assert [m for m in program.microbatches if m.segments] == list(before.microbatches)
    assert Program.from_json(program.to_json()) == program


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
    apart = dataclasses.replace(program, is_in_step=False)
    assert simulate(apart, LinearCost()).makespan_s == 2 * (40 + 30)


def test_checker_when_a_device_is_out_of_step_then_says_so():
    """One without its last microbatch, and a program that waits for a step of somebody who has to run first."""
    own = [job("a", 40, 30, home=0), job("b", 20, home=1, steps=1)]
    program = plan(own, 2)
    first, second = program.stages
    k = max(i.microbatch for i in second if isinstance(i, Forward))
    assert not program.microbatches[k].segments
    shorter = tuple(i for i in second if getattr(i, "microbatch", None) != k)
    wrong = dataclasses.replace(program, stages=(first, shorter), microbatches=program.microbatches[:k])
    assert "stage 0 waits for ever at Forward" in "; ".join(violations(wrong, own, LIMITS))
    assert violations(dataclasses.replace(wrong, is_in_step=False), own, LIMITS) == []


def test_program_when_it_is_in_step_then_stays_as_it_is():
    program = plan([job("a", 40, 30, 20, 10), job("b", 20, home=1)], 2)
    assert in_step(program) == program
