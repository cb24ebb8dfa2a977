"""The pipeline that is chosen is at least as good as any of its parts."""

from __future__ import annotations

import random

import pytest

from benchmarks.planning.best_pipeline import best_pipeline
from weft.plan.check import violations
from weft.plan.cost.types import LinearCost
from weft.plan.pack.rounds import pack_rounds
from weft.plan.pack.types import RoundLimits
from weft.plan.pipeline.build import Schedule, build
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Batch, JobQueue

LIMITS = RoundLimits(capacity=160, num_stages=3)


def jobs() -> list[JobQueue]:
    rng = random.Random(0)
    return [
        JobQueue(
            f"job{j}", tuple(Batch(b, 0, tuple(rng.randint(1, 30 + 10 * j) for _ in range(6))) for b in range(4)), True
        )
        for j in range(3)
    ]


@pytest.mark.parametrize(("memory_bytes", "keep_order"), [(None, True), ([480, 360, 240], False)])
def test_best_pipeline_is_valid_and_no_slower_than_the_published_way(
    memory_bytes: list[int] | None, keep_order: bool
) -> None:
    """All samples, memory kept, and a makespan not above that of the packing at its plain distance."""
    cost = LinearCost(fixed_s=5.0, pair_s=0.01)
    plan = best_pipeline(jobs(), LIMITS, cost, memory_bytes=memory_bytes, keep_order=keep_order)
    assert violations(plan.program, cost=cost, memory_bytes=memory_bytes) == []
    samples = [s for m in plan.program.microbatches for s in m.segments]
    assert len(samples) == 3 * 4 * 6 and plan.rounds.keeps_order == keep_order
    packed = pack_rounds(jobs(), LIMITS, cost=cost, keep_order=keep_order).stream
    published = build(Schedule.MULTI_ADAPTER, packed, 3, cost=cost, memory_bytes=memory_bytes)
    assert plan.timeline.makespan_s <= simulate(published, cost).makespan_s + 1e-9


def test_best_pipeline_of_uneven_samples_runs_ahead() -> None:
    """Places to spare pay where lengths are uneven, and the plan names what it took."""
    plan = best_pipeline(jobs(), LIMITS, LinearCost())
    assert plan.slack > 0 and plan.schedule is Schedule.EAGER
    assert plan.program == best_pipeline(jobs(), LIMITS, LinearCost()).program
