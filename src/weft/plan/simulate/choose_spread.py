"""The fastest program found for several replicas, of which each chooses who shares its microbatches.

As long as no job is spread, replicas wait for each other at the end of a program only, so each of them that has stages
gets the fastest of a few packings of the jobs at home there, in one group or in several (`choose.py`). Where jobs are
spread, replicas wait for each other at every step of these, which the fusion of one pipeline does not price: then each
packs its part greedily.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.pipeline.planner import whole_batches
from weft.plan.program import Program
from weft.plan.simulate.choose import FastestPipeline, PipelineChoice
from weft.plan.spread.deal import DealtQueues
from weft.plan.spread.planner import SpreadPlanner
from weft.plan.types import JobQueue, Limits, Microbatch

PreviousMicrobatches = tuple[tuple[Microbatch, ...], ...]
"""Of each replica, the last microbatches of the program that the next one is appended to; none: all are empty."""


@dataclass(frozen=True)
class FastestSpread:
    """A planner for several replicas, at least one of them in stages."""

    quick: SpreadPlanner
    """What plans at once, where nobody can wait for this one."""
    row_tile: int = 1
    measured: tuple[tuple[CostModel, AdapterTimes], ...] | None = None
    """What passes were measured to take on each replica; None: nothing is known beyond its cost model."""
    behind: PreviousMicrobatches = ()

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program."""
        choice = self.choose(queues, limits)
        return self.quick(queues, limits) if choice is None else choice.program

    def choose(self, queues: Sequence[JobQueue], limits: Limits) -> PipelineChoice | None:
        """The next program, and how jobs are grouped on the replicas in stages; None where that is no question."""
        sizes = self.quick.replica_sizes
        homes = [[queue for queue in queues if queue.home == k] for k in range(len(sizes))]
        if any(queue.home is None for queue in queues) or not any(
            size > 1 and len(own) > 1 for size, own in zip(sizes, homes, strict=True)
        ):
            return None
        whole = whole_batches(queues, limits, sum(sizes))
        streams: list[Sequence[Microbatch]] = []
        found: list[PipelineChoice] = []
        others_s = 0.0
        for k, (size, holds) in enumerate(zip(sizes, self.quick.holds(limits.capacity), strict=True)):
            own = DealtQueues([queue for queue in whole if queue.home == k], {})
            there = Limits(max(holds, own.longest), sys.maxsize)
            if not own.queues or size == 1:
                streams.append(own.packed(there))
                others_s = max(others_s, self._seconds(k, streams[-1]))
                continue
            cost, adapters = (self.quick.costs[k], None) if self.measured is None else self.measured[k]
            behind = self.behind[k] if self.behind else ()
            found.append(FastestPipeline(size, cost, adapters, self.row_tile, behind).choose(own.queues, there))
            streams.append([m for m in found[-1].program.microbatches if m.segments])
        several = [choice.seconds if choice.several_groups_s is None else choice.several_groups_s for choice in found]
        has_several = any(choice.several_groups_s is not None for choice in found)
        return PipelineChoice(
            self.quick.assemble(streams, {}),
            tuple(group for choice in found for group in choice.groups),
            tuple(fill for choice in found for fill in choice.fills),
            max(others_s, *(choice.seconds for choice in found)),
            max(others_s, *(choice.one_group_s for choice in found)),
            max(others_s, *several) if has_several else None,
            num_replicas=len(found),
        )

    def _seconds(self, replica: int, stream: Sequence[Microbatch]) -> float:
        """Of a replica of one stage."""
        cost, adapters = (self.quick.costs[replica], None) if self.measured is None else self.measured[replica]
        lengths = ([segment.length for segment in m.segments] for m in stream)
        added_s = 0.0 if adapters is None else sum(2 * adapters.microbatch_s(m.job_tokens) for m in stream)
        return sum(cost.forward_s(own, 0) + cost.backward_s(own, 0) for own in lengths) + added_s
