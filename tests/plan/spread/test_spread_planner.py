"""Programs for several replicas: every sample once, no replica waits for ever, for any jobs and replicas."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.check import violations
from weft.plan.cost.fit import Fit
from weft.plan.cost.learned import PASSES, AdapterTimes, LearnedCost
from weft.plan.cost.types import LinearCost
from weft.plan.level import PlannedReplicas, choose_homes
from weft.plan.planner import HomeLoad
from weft.plan.program import Forward, Measure, Program, Step
from weft.plan.simulate.interpret import simulate
from weft.plan.spread import SpreadPlanner
from weft.plan.types import Batch, JobQueue, Limits

LIMITS = Limits(capacity=64, max_microbatches=3)


@st.composite
def queues(draw: st.DrawFn, num_replicas: int) -> list[JobQueue]:
    found = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        lengths = st.lists(st.integers(1, 60), min_size=1, max_size=7)
        first = draw(st.integers(0, 3))
        batches = tuple(Batch(first + n, 0, tuple(draw(lengths))) for n in range(draw(st.integers(1, 4))))
        home = draw(st.one_of(st.none(), st.integers(0, num_replicas - 1)))
        found.append(JobQueue(name, batches, is_all=True, home=home))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_program_when_jobs_are_spread_and_at_home_then_passes_the_checker_and_comes_to_its_end(data, sizes):
    own = data.draw(queues(len(sizes)))
    costs = tuple(LinearCost(fixed_s=data.draw(st.sampled_from([0.0, 5.0])), token_s=1 / size) for size in sizes)
    program = SpreadPlanner(tuple(sizes), costs)(own, LIMITS)
    if len(program.stages) > 1:
        assert violations(program, own, LIMITS) == []
        assert simulate(program, costs).makespan_s > 0
    assert Program.from_json(program.to_json()) == program


def job(name: str, *lengths: int, home: int | None = None, steps: int = 2) -> JobQueue:
    return JobQueue(name, tuple(Batch(n, 0, lengths) for n in range(steps)), is_all=True, home=home)


def test_program_when_one_job_is_spread_then_replicas_get_alike_parts_and_all_step():
    program = SpreadPlanner((1, 1), (LinearCost(), LinearCost()))([job("a", 40, 30, 20, 10)], LIMITS)
    tokens = [[m.num_tokens for m in program.microbatches[n : n + 2]] for n in (0, 2)]
    assert tokens == [[50, 50], [50, 50]]
    for instructions in program.stages:
        assert [i for i in instructions if isinstance(i, Step)] == [Step("a", 0), Step("a", 1)]
    assert program.measuring == {Measure("a", 0): (0, 1), Measure("a", 1): (0, 1)}


def test_program_when_a_replica_has_jobs_of_its_own_then_gets_less_of_those_that_are_spread():
    own = [job("home", 30, 30, home=0, steps=1), job("free", *[10] * 6, steps=1)]
    program = SpreadPlanner((1, 1), (LinearCost(), LinearCost()))(own, LIMITS)
    assert simulate(program, LinearCost()).makespan_s == 2 * 60


def test_program_when_a_replica_is_faster_then_gets_more():
    program = SpreadPlanner((1, 1), (LinearCost(), LinearCost(token_s=0.5)))([job("a", *[10] * 6, steps=1)], LIMITS)
    (home,) = [m for m in program.microbatches if m.num_tokens == 20]
    assert program.microbatches.index(home) in {i.microbatch for i in program.stages[0] if hasattr(i, "microbatch")}


def test_checker_when_a_program_of_several_replicas_is_wrong_then_reports_it():
    own = [job("a", 40, 30, 20, 10), job("b", 20, home=1)]
    program = SpreadPlanner((1, 1), (LinearCost(), LinearCost()))(own, LIMITS)

    def found(**changes: object) -> str:
        return "; ".join(violations(dataclasses.replace(program, **changes), own, LIMITS))

    first, second = program.stages
    assert "is of a microbatch that another replica runs" in found(stages=(first + second[:1], second))
    assert "Step(job='a', step=1) is missing" in found(stages=(first, tuple(i for i in second if i != Step("a", 1))))
    assert "steps a job that is not at home here" in found(stages=((*first, Step("b", 0)), second))
    assert "where b is not at home" in found(stages=(second, first))
    assert "not the 2 that are there" in found(replica_sizes=(1, 2))
    doubled = tuple(program.microbatches[0] if m == program.microbatches[-1] else m for m in program.microbatches)
    assert "is not a sample that a has left" in found(microbatches=doubled)


def test_program_when_a_plan_states_what_replicas_hold_then_none_gets_more():
    """Neither a sample nor a microbatch; jobs at home where they fit, even if another is faster."""
    planned = PlannedReplicas(holds=(30, 1000), home_s={"planned": (1.0, 5.0)})
    planner = SpreadPlanner((1, 1), (LinearCost(), LinearCost(token_s=5.0)), planned)
    program = planner([job("a", 40, 30, 20, 10, 10)], LIMITS)
    tokens = [
        {program.microbatches[i.microbatch].num_tokens for i in own if isinstance(i, Forward)} for own in program.stages
    ]
    assert max(tokens[0]) <= 30 and max(tokens[1]) >= 40
    loads = {"long": HomeLoad(10.0, 40), "planned": HomeLoad(1.0, 1), "short": HomeLoad(10.0, 30)}
    seconds = planner.home_seconds(loads, LIMITS.capacity)
    assert seconds["planned"] == (1.0, 5.0) and seconds["long"][0] == math.inf
    assert choose_homes(seconds) == {"planned": 0, "long": 1, "short": 0}


def test_program_when_measured_time_is_all_of_adapters_then_passes_the_checker():
    """So it is if all microbatches have the same jobs and no padding: then nothing separates rows and adapters."""
    own = [job("a", 40, 30, 20, 10, steps=3), job("b", *[7] * 9, steps=3)]
    fits = {(name, stage): Fit({"rank_tokens": 1.0}) for name in PASSES for stage in range(2)}
    costs = LearnedCost(fits, {}, 1, LinearCost()), AdapterTimes(0.0, 0.0)
    program = SpreadPlanner((1, 2), (LinearCost(),) * 2, measured=(costs,) * 2)(own, LIMITS)
    assert violations(program, own, LIMITS) == []
