"""The best pipeline for some jobs: packs, builds and simulates a few candidates, and keeps the fastest.

Problem: min makespan over the packing of samples into microbatches and the order of every stage, subject to capacity,
memory, and each job's steps. A candidate is a distance and a schedule. The distance is how many microbatches lie
between a job's global batch and its next. At the published S - 1, and even at S where equal microbatches leave no
bubble, nothing is to spare: the smallest unevenness makes a stage wait for a step. A few more places absorb it, if
stages may run ahead (`eager`), at the price of more, smaller microbatches. Which of them wins depends on the lengths,
so all are simulated; deterministic as long as packing is, ties go to the smaller distance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from weft.cost.types import CostModel
from weft.plan.pack.rounds import pack_rounds
from weft.plan.pack.types import RoundLimits, RoundPlan
from weft.plan.pipeline.build import Schedule, build
from weft.plan.pipeline.planner import PipelinePlanner, whole_batches
from weft.plan.program import Program
from weft.plan.types import JobQueue, Limits
from weft.simulate.interpret import simulate
from weft.simulate.timeline import Timeline

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
    budget_s: float = 2.0,
) -> PipelinePlan:
    """The candidate with the least simulated makespan; `budget_s` is for the exact solves of all packings together."""
    best: PipelinePlan | None = None
    for slack in SLACKS:
        apart = dataclasses.replace(limits, num_stages=limits.num_stages + slack)
        even = _AverageStage(cost, limits.num_stages)
        rounds = pack_rounds(jobs, apart, cost=even, budget_s=budget_s / len(SLACKS), keep_order=keep_order)
        for schedule in SCHEDULES:
            program = build(schedule, rounds.stream, limits.num_stages, cost=cost, memory_bytes=memory_bytes)
            timeline = simulate(program, cost)
            if best is None or timeline.makespan_s < best.timeline.makespan_s:
                best = PipelinePlan(program, timeline, rounds, schedule, slack)
    assert best is not None
    return best


@dataclass(frozen=True)
class FastestPipeline:
    """A planner for a replica of several stages: of a few packings, each job in its own order, the fastest simulated.

    The next global batch of a job is kept as far away as equal microbatches need it, or up to twice as far, which
    leaves room for unlike ones; stages run ahead, within memory for twice as many full microbatches as there are
    stages. Where jobs do not allow it, and where nothing else is faster, microbatches are packed greedily.
    """

    num_stages: int
    cost: CostModel

    @property
    def quick(self) -> PipelinePlanner:
        """What plans at once, where nobody can wait for this one."""
        return PipelinePlanner(Schedule.EAGER, self.num_stages)

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program."""
        greedy = self.quick(queues, limits)
        if any(queue.lane or any(batch.groups for batch in queue.batches) for queue in queues):
            return greedy
        whole = whole_batches(queues, limits, self.num_stages)
        even = _AverageStage(self.cost, self.num_stages)
        memory = [
            2 * self.num_stages * self.cost.held_bytes([limits.capacity], stage) for stage in range(self.num_stages)
        ]
        candidates = [greedy]
        for slack in (0, self.num_stages // 2, self.num_stages):
            apart = RoundLimits(limits.capacity, self.num_stages + slack)
            stream = pack_rounds(whole, apart, cost=even, budget_s=0.0, keep_order=True).stream
            candidates.append(build(Schedule.EAGER, stream, self.num_stages, cost=self.cost, memory_bytes=memory))
        return min(candidates, key=lambda program: simulate(program, self.cost).makespan_s)


@dataclass(frozen=True)
class _AverageStage:
    """A cost model that is the same on all stages: packing levels microbatches, whatever stage they are on."""

    cost: CostModel
    num_stages: int

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return sum(self.cost.forward_s(lengths, s) for s in range(self.num_stages)) / self.num_stages

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return sum(self.cost.backward_s(lengths, s) for s in range(self.num_stages)) / self.num_stages

    def transfer_s(self, num_tokens: int) -> float:
        return self.cost.transfer_s(num_tokens)

    def step_s(self, stage: int) -> float:
        return sum(self.cost.step_s(s) for s in range(self.num_stages)) / self.num_stages

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return max(self.cost.held_bytes(lengths, s) for s in range(self.num_stages))
