"""Replicas in stages choose who shares microbatches among the jobs at home there."""

from __future__ import annotations

from dataclasses import replace

from weft.engine.events import JobsGrouped
from weft.plan.check import violations
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import LinearCost
from weft.plan.simulate.choose import FastestSpread
from weft.plan.simulate.interpret import simulate
from weft.plan.spread import SpreadPlanner
from weft.plan.types import Batch, JobQueue, Limits

LIMITS = Limits(100)
COST = LinearCost(fixed_s=5.0)
QUICK = SpreadPlanner((1, 2, 3), (COST,) * 3)


def queues() -> list[JobQueue]:
    """One job on a replica of one stage, three on each of the others."""
    lengths = {"b": (40,) * 8, "c": (10,) * 8, "d": (5, 30) * 4}
    own = {"a": (0, (20,) * 4), **{f"{name}{k}": (k, each) for k in (1, 2) for name, each in lengths.items()}}
    return [
        JobQueue(job, tuple(Batch(n, 0, each) for n in range(4)), is_all=True, home=home)
        for job, (home, each) in own.items()
    ]


def test_replicas_when_adapters_cost_much_then_group_their_own_jobs_and_the_program_is_right():
    planner = FastestSpread(replace(QUICK, measured=((COST, AdapterTimes(100.0, 0.0)),) * 3))
    choice = planner.choose(queues(), LIMITS)
    assert choice is not None and violations(choice.program, queues(), LIMITS) == []
    assert len(choice.groups) > choice.num_replicas == 2 and choice.seconds < 0.99 * choice.one_group_s
    assert all(len({job[-1] for job in group}) == 1 for group in choice.groups)
    grouped = {job: group for group in choice.groups for job in group}
    for microbatch in choice.program.microbatches:
        members = microbatch.job_tokens.keys() - {"a"}
        assert all(members <= {*grouped[job]} for job in members)


def test_replicas_when_passes_cost_much_then_one_group_each_and_no_slower_than_at_once():
    quick = replace(QUICK, costs=(LinearCost(fixed_s=500.0),) * 3)
    choice = FastestSpread(quick).choose(queues(), LIMITS)
    assert choice is not None and len(choice.groups) == choice.num_replicas == 2
    costs = list(quick.costs)
    at_once = simulate(quick(queues(), LIMITS), costs).makespan_s
    assert simulate(choice.program, costs).makespan_s <= at_once * (1 + 1e-9)
    text = JobsGrouped(choice.groups, choice.fills, 0.05, 0, choice.num_replicas).text
    assert text.startswith("one group on each of 2 replicas in stages is best; several groups would take 5.0% longer")


def test_replicas_when_a_job_is_spread_or_none_has_company_then_nothing_is_chosen():
    spread = [replace(queue, home=None) if queue.job == "a" else queue for queue in queues()]
    planner = FastestSpread(QUICK)
    assert planner.choose(spread, LIMITS) is None and planner(spread, LIMITS) == QUICK(spread, LIMITS)
    alone = [queue for queue in queues() if queue.job in ("a", "b1", "b2")]
    assert planner.choose(alone, LIMITS) is None
