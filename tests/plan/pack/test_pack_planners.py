"""Order-keeping planners: valid, never worse than greedy, optimal where they can search everything."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.check import violations
from weft.plan.pack import pack, planner_named, planners
from weft.plan.pack.planners import ExactPlanner, lower_bound
from weft.plan.program import Program, Step
from weft.plan.types import Batch, JobQueue, Limits, Segment

CAPACITY = 10
NARROW = [
    JobQueue("a", (Batch(0, 0, (9, 9)), Batch(1, 0, (6,))), True),
    JobQueue("b", (Batch(0, 0, (4, 9, 7)), Batch(1, 0, (2, 5, 2))), True),
]


@st.composite
def waiting(draw: st.DrawFn) -> list[JobQueue]:
    made = []
    for j in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=4), min_size=1, max_size=2))
        batches = tuple(Batch(b, 0, tuple(own)) for b, own in enumerate(lengths))
        made.append(JobQueue(f"job{j}", batches, draw(st.booleans())))
    return made


def chains_of(program: Program) -> list[list[Segment]]:
    chains: dict[str, list[Segment]] = {}
    for m in program.microbatches:
        for s in m.segments:
            chains.setdefault(s.job, []).append(s)
    return list(chains.values())


def names(program: Program) -> list[str]:
    return sorted(str(s) for chain in chains_of(program) for s in chain)


def fewest_by_force(chains: list[list[Segment]]) -> int:
    """Breadth first over everything that fits, maximal or not."""

    def takes(state: tuple[int, ...], j: int, used: int) -> Iterator[tuple[int, ...]]:
        if j == len(chains):
            yield state
            return
        n = state[j]
        while True:
            yield from takes((*state[:j], n, *state[j + 1 :]), j + 1, used)
            if n == len(chains[j]) or chains[j][n].step != chains[j][state[j]].step:
                return
            used += chains[j][n].length
            if used > CAPACITY:
                return
            n += 1

    level, num = {(0,) * len(chains)}, 0
    while tuple(map(len, chains)) not in level:
        level, num = {after for state in level for after in takes(state, 0, 0)}, num + 1
    return num


@pytest.mark.parametrize("name", ["auto", "exact", "greedy"])
@given(queues=waiting(), most=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_planner_when_any_queues_then_valid_and_runs_what_greedy_runs(name, queues, most):
    limits = Limits(CAPACITY, most)
    program, greedy = planner_named(name)(queues, limits), pack(queues, limits)
    assert violations(program, queues, limits) == []
    assert len(program.microbatches) <= len(greedy.microbatches)
    assert names(program) == names(greedy)
    steps = [{i for i in p.stages[0] if isinstance(i, Step)} for p in (program, greedy)]
    assert steps[0] == steps[1]
    assert planner_named(name)(queues, limits) == program


@settings(max_examples=60, deadline=None)
@given(waiting())
def test_exact_when_small_then_as_few_microbatches_as_brute_force(queues):
    limits = Limits(CAPACITY, 100)
    program = planner_named("exact")(queues, limits)
    best = fewest_by_force(chains_of(program)) if program.microbatches else 0
    assert len(program.microbatches) == best
    assert lower_bound(chains_of(program), CAPACITY) <= best


def test_exact_when_greedy_is_not_the_best_then_saves_a_microbatch():
    """Greedy serves a first and leaves 9 and 3 for one microbatch each; 9 first lets 3 join 7."""
    queues = [
        JobQueue("a", (Batch(0, 0, (7,)),), True),
        JobQueue("b", (Batch(0, 0, (9, 3)),), True),
    ]
    limits = Limits(CAPACITY)
    assert len(pack(queues, limits).microbatches) == 3
    assert len(planner_named("exact")(queues, limits).microbatches) == 2
    assert len(planner_named("auto")(queues, limits).microbatches) == 2


def test_exact_when_a_batch_ends_in_a_microbatch_with_room_then_that_is_still_a_choice():
    """The next batch's sample may not join, however much room is left."""
    assert len(pack(NARROW, Limits(CAPACITY)).microbatches) == 7
    assert len(planner_named("exact")(NARROW, Limits(CAPACITY)).microbatches) == 6


def test_exact_when_priorities_differ_then_leaves_the_order_to_greedy():
    queues = [
        JobQueue("a", (Batch(0, 0, (7,)),), True, priority=1),
        JobQueue("b", (Batch(0, 0, (9, 3)),), True),
    ]
    assert planner_named("exact")(queues, Limits(CAPACITY)) == pack(queues, Limits(CAPACITY))
    equal = [dataclasses.replace(q, priority=1) for q in queues]
    assert planner_named("exact")(equal, Limits(CAPACITY)) != pack(equal, Limits(CAPACITY))


def hard(seed: int, num_jobs: int = 8, capacity: int = 1024) -> list[JobQueue]:
    """Queues as an engine has them, of many jobs: a search takes long."""
    rng = random.Random(seed)
    return [
        JobQueue(f"job{j}", tuple(Batch(b, 0, tuple(rng.choices(range(16, 600), k=8))) for b in range(8)), False)
        for j in range(num_jobs)
    ]


def test_exact_when_time_is_up_then_there_is_a_plan_all_the_same_and_soon():
    queues, limits = hard(0), Limits(1024)
    begun = time.perf_counter()
    program = ExactPlanner(10**6, 0.05)(queues, limits)
    assert time.perf_counter() - begun < 60, "so long only if the clock is ignored"
    assert violations(program, queues, limits) == []
    assert ExactPlanner(10**6, 60.0).within(0.0)(queues, limits) == pack(queues, limits)
    assert ExactPlanner(10**6, 0.05).within(60.0).budget_s == 0.05


def test_exact_when_its_wide_search_runs_out_of_time_then_no_worse_than_auto(monkeypatch):
    """What the narrow search found before is kept."""
    queues, limits, search = NARROW, Limits(CAPACITY), planners._search

    def impatient(*given, **named):
        if given[3] > planners.AUTO_STATES:
            raise TimeoutError
        return search(*given, **named)

    monkeypatch.setattr(planners, "_search", impatient)
    assert len(planner_named("exact")(queues, limits).microbatches) == 6


def test_search_when_the_clock_has_passed_then_reports_it():
    """In the middle of a level too."""
    chains = chains_of(pack(NARROW, Limits(CAPACITY)))
    with pytest.raises(TimeoutError):
        planners._search(chains, CAPACITY, 7, 300, until=0.0)
    with pytest.raises(TimeoutError):
        planners._undominated({(1,): (0,)}, 5, [[0, 1]], until=0.0)


def test_planner_named_when_unknown_then_lists_the_names():
    with pytest.raises(PlanError, match="'best'; use auto, exact, greedy"):
        planner_named("best")
