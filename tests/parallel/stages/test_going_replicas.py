"""Replicas that are appended to while they run train every job to the bits of one device, at home or spread."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from covering import chosen
from test_going_on import Watched, short
from test_staged import done
from tiny_models import Job, assert_same_bits, finish, random_backbone, submit, train

from weft.engine.engine import Engine
from weft.engine.events import Event, StepDone
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.append import DealtStream, joined_all
from weft.plan.pipeline.orders import open_pipe
from weft.plan.simulate.interpret import simulate
from weft.plan.spread import SpreadPlanner
from weft.plan.types import max_lead

COST = LinearCost(fixed_s=4.0)


def planner_of(*replicas: tuple[int, ...]) -> SpreadPlanner:
    return SpreadPlanner(tuple(map(len, replicas)), (COST,) * len(replicas))


def one_device(jobs: Sequence[Job]) -> dict[str, Any]:
    return train(random_backbone("llama", num_hidden_layers=2), jobs, capacity=48)


def assert_bits(found: dict[str, Any], jobs: Sequence[Job]) -> None:
    for name, outcome in one_device(jobs).items():
        assert_same_bits(found[name], outcome)


def test_jobs_when_two_replicas_in_stages_go_on_then_have_the_bits_of_one_device_and_the_simulator_s_order(monkeypatch):
    """Clipped, with dropout; jobs end one after another, and the last one has a replica for itself."""
    jobs = [short(name, seed, max_steps=4 + seed, max_grad_norm=0.05) for seed, name in enumerate("abcd")]
    layout = ((1, 1), (1, 1))
    watched = Watched(monkeypatch, planner_of(*layout), layout)
    submit(watched.engine, *jobs)
    assert_bits(finish(watched.engine), jobs)
    assert len(watched.planned) > 2 and min(watched.num_under_way[:-1]) >= 2
    pipes = [open_pipe(2, max_lead=max_lead(2))] * 2
    whole = joined_all([DealtStream.of(program) for program in watched.planned], pipes, [(COST, None)] * 2)
    expected, measured = simulate(whole, (COST, COST)), watched.engine.timeline.measured()
    numbers = [number for program in watched.planned for number in range(len(program.microbatches))]
    for stage in range(4):
        order = [(name, numbers[what] if isinstance(what, int) else what) for name, what in done(expected, stage)]
        assert done(measured, stage) == order


@dataclass(frozen=True)
class UnlikeDeals(SpreadPlanner):
    """Takes replicas for faster and slower than they are, at random, so that samples are dealt out in any way."""

    rng: random.Random = random.Random(0)

    def speeds(self, capacity: int) -> list[float]:
        return [self.rng.choice([0.1, 1.0, 10.0]) for _ in super().speeds(capacity)]


@pytest.mark.parametrize("seed", chosen(range(4), 1, 3))
def test_spread_jobs_when_replicas_go_on_then_have_the_bits_of_one_device(seed, monkeypatch):
    """However samples are dealt out, beside jobs that come and end: no program waits for one that waits for it."""
    rng = random.Random(seed)
    layout = rng.choice([((2,), (2,)), ((2,), (1, 1)), ((1, 1), (1, 1)), ((2,), (1, 1), (2,))])
    sizes = tuple(map(len, layout))
    sums = ["any_order", "any_order", "in_order", rng.choice(["any_order", "in_order"])]
    first = [short(name, k, max_steps=rng.randint(2, 6), gradient_sum=sums[k]) for k, name in enumerate("abc")]
    late = short("late", 3, max_steps=3, gradient_sum=sums[3])
    planner = UnlikeDeals(sizes, tuple(LinearCost(4.0, token_s=1 / size) for size in sizes), rng=rng)
    watched = Watched(monkeypatch, planner, layout)
    submit(watched.engine, *first)

    def join(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and "late" not in engine.jobs:
            submit(engine, late)

    assert_bits(finish(watched.engine, join), [*first, late])
    assert max(watched.num_under_way) >= 2


def test_spread_job_when_it_comes_to_replicas_that_shared_none_then_these_run_empty_first(monkeypatch):
    """Only while none is at work are ways opened between them; from then on they go on again."""
    layout = ((2,), (2,))
    jobs = [short("a", max_steps=8), short("b", 1, max_steps=8)]
    free = short("free", 2, max_steps=6, gradient_sum="any_order")
    watched = Watched(monkeypatch, planner_of(*layout), layout)
    submit(watched.engine, *jobs)

    def join(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and "free" not in engine.jobs:
            submit(engine, free)

    assert_bits(finish(watched.engine, join), [*jobs, free])
    has_free = ["free" in {name for m in program.microbatches for name in m.job_tokens} for program in watched.planned]
    come = has_free.index(True)
    assert watched.num_under_way[come - 1] == 1 and watched.num_under_way[come] == 2


def test_job_when_it_is_to_move_then_does_so_once_nothing_of_it_is_under_way(monkeypatch):
    """Two of three share a replica; when the third has ended, one of them has the other replica."""
    layout = ((1, 1), (1, 1))
    jobs = [short("a", max_steps=12), short("b", 1, max_steps=12), short("c", 2, max_steps=2, global_batch_size=8)]
    watched = Watched(monkeypatch, planner_of(*layout), layout)
    submit(watched.engine, *jobs)
    homes: list[dict[str, int | None]] = []

    def watch(engine: Engine, event: Event) -> None:
        homes.append({name: job.home for name, job in engine.jobs.items()})

    assert_bits(finish(watched.engine, watch), jobs)
    assert homes[-1]["a"] != homes[-1]["b"]
    together = [own for own in homes if own["a"] == own["b"]]
    assert together and min(watched.num_under_way[:-2]) == 2
