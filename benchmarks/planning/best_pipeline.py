"""The best pipeline for some jobs, whatever the order of their samples: no run trains it, since its bits depend on it.

A candidate is a distance (how many microbatches lie between a job's global batch and its next) and a schedule; all are
simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.cost.types import CostModel
from weft.plan.pack.rounds import pack_rounds
from weft.plan.pack.types import RoundLimits, RoundPlan
from weft.plan.pipeline.build import Schedule, build
from weft.plan.program import Program
from weft.plan.simulate.choose import _AverageStage
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import Timeline
from weft.plan.types import JobQueue

SLACKS = (0, 2, 4)
"""Places to spare, tried in this order."""
SCHEDULES = (Schedule.MULTI_ADAPTER, Schedule.EAGER)


@dataclass(frozen=True)
class PipelinePlan:
    """The fastest candidate, and what it is expected to do."""

    program: Program
    timeline: Timeline
    rounds: RoundPlan
    schedule: Schedule
    slack: int
    """Places by which a job's global batches are further apart than the number of stages."""


def best_pipeline(
    jobs: Sequence[JobQueue],
    limits: RoundLimits,
    cost: CostModel,
    *,
    memory_bytes: Sequence[int] | None = None,
    keep_order: bool = False,
) -> PipelinePlan:
    """The candidate with the least simulated makespan."""
    best: PipelinePlan | None = None
    for slack in SLACKS:
        apart = dataclasses.replace(limits, num_stages=limits.num_stages + slack)
        even = _AverageStage(cost, limits.num_stages)
        rounds = pack_rounds(jobs, apart, cost=even, keep_order=keep_order)
        for schedule in SCHEDULES:
            program = build(schedule, rounds.stream, limits.num_stages, cost=cost, memory_bytes=memory_bytes)
            timeline = simulate(program, cost)
            if best is None or timeline.makespan_s < best.timeline.makespan_s:
                best = PipelinePlan(program, timeline, rounds, schedule, slack)
    assert best is not None
    return best
