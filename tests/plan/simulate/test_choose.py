"""The pipeline that is chosen is at least as good as any of its parts."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.check import violations
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import LinearCost
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Batch, JobQueue, Limits


def jobs() -> list[JobQueue]:
    rng = random.Random(0)
    return [
        JobQueue(
            f"job{j}", tuple(Batch(b, 0, tuple(rng.randint(1, 30 + 10 * j) for _ in range(6))) for b in range(4)), True
        )
        for j in range(3)
    ]


@st.composite
def queues_of_any_kind(draw: st.DrawFn) -> list[JobQueue]:
    """With steps anywhere, unequal numbers of batches, and now and then a lane or groups, which rounds do not take."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)
        batches = [Batch(7 + n, 0, tuple(draw(sizes))) for n in range(draw(st.integers(1, 4)))]
        lane = draw(st.sampled_from(["", "", "own"]))
        found.append(JobQueue(f"job{number}", tuple(batches), draw(st.booleans()), lane=lane))
    return found


@settings(max_examples=30)
@given(queues=queues_of_any_kind(), num_stages=st.integers(1, 4), most=st.integers(1, 3))
def test_fastest_pipeline_of_any_queues_keeps_every_order_and_is_no_slower_than_the_greedy_one(
    queues: list[JobQueue], num_stages: int, most: int
) -> None:
    """So it trains the same bits, and nobody loses by it."""
    limits, cost = Limits(9, most), LinearCost(fixed_s=2.0, pair_s=0.1, send_s=0.1)
    planner = FastestPipeline(num_stages, cost)
    program = planner(queues, limits)
    assert violations(program, queues, limits) == []
    greedy = planner.quick(queues, limits)
    assert simulate(program, cost).makespan_s <= simulate(greedy, cost).makespan_s


def test_fastest_pipeline_when_empty_microbatches_cost_nothing_then_one_stage_has_none() -> None:
    """Nobody waits there for what is to be kept apart."""
    limits = Limits(1024, 16)
    for seed in (0, 5, 7, 9):
        rng = random.Random(seed)
        batches = [Batch(step, 0, tuple(rng.randint(12, 18) for _ in range(8))) for step in range(7)]
        queues = [JobQueue("a", tuple(batches), True)]
        program = FastestPipeline(1, LinearCost(fixed_s=0.0, token_s=1e-4))(queues, limits)
        assert violations(program, queues, limits) == []


def test_fastest_pipeline_when_all_sums_are_free_then_takes_samples_out_of_order_where_that_is_faster() -> None:
    """And never where a single job's are not."""
    lengths = (60, 60, 60, 60, 40, 40, 40, 40)
    free = [JobQueue(job, tuple(Batch(n, 0, lengths) for n in range(2)), True, home=None) for job in "ab"]
    planner, limits = FastestPipeline(2, LinearCost(fixed_s=50.0)), Limits(100)
    assert violations(planner(free, limits), free, limits) == []
    ordered = [dataclasses.replace(queue, home=0) for queue in free]
    seconds = [simulate(planner(own, limits), planner.cost).makespan_s for own in (free, ordered)]
    assert seconds[0] < seconds[1]
    mixed = [free[0], ordered[1]]
    assert violations(planner(mixed, limits), mixed, limits) == []


def test_fastest_pipeline_when_jobs_are_unlike_then_is_faster_than_the_greedy_one() -> None:
    planner = FastestPipeline(3, LinearCost(fixed_s=5.0, pair_s=0.01))
    limits = Limits(160)
    seconds = [simulate(plan(jobs(), limits), planner.cost).makespan_s for plan in (planner, planner.quick)]
    assert seconds[0] < 0.9 * seconds[1]


def test_choice_when_adapters_cost_by_the_job_then_jobs_are_grouped_and_it_is_said_what_that_gains() -> None:
    """A job that is in fewer microbatches runs its adapter less often."""
    planner = FastestPipeline(3, LinearCost(fixed_s=5.0), AdapterTimes(100.0, 0.0))
    choice = planner.choose(jobs(), Limits(400))
    assert len(choice.groups) > 1 and sorted(sum(choice.groups, ())) == ["job0", "job1", "job2"]
    assert choice.seconds == choice.several_groups_s < 0.9 * choice.one_group_s
    assert violations(choice.program, jobs(), Limits(400)) == []
    measured = simulate(choice.program, planner.cost, adapters=planner.adapters).makespan_s
    assert measured == choice.seconds


def test_choice_when_microbatches_cost_by_the_piece_then_one_group_is_best_and_it_is_said_by_how_much() -> None:
    """Few full microbatches, whoever is in them."""
    choice = FastestPipeline(2, LinearCost(fixed_s=500.0)).choose(jobs(), Limits(160))
    assert choice.groups == (("job0", "job1", "job2"),)
    assert choice.several_groups_s is None or choice.several_groups_s > 0.99 * choice.seconds
