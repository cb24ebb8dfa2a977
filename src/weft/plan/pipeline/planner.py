"""Plans programs of several stages from queues: whole global batches, each job's samples in their order.

Samples are packed as for one device, by the greedy planner; where a schedule wants microbatches of one job or of one
round alone, job by job or round by round. The schedule then says what each stage does when. A program holds whole
global batches, at least one of every job: what it begins, it steps. As the stages drain at its end, it is longer than
that of one device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.plan.pack.greedy import pack
from weft.plan.pipeline.build import Schedule, build
from weft.plan.program import Program
from weft.plan.types import JobQueue, Limits, Microbatch

LENGTHENED = 2
"""A program is so many times as long, for every stage, as one of one device: of 16 full microbatches on one device, S
stages then idle about a fortieth of the time while they fill and drain."""


@dataclass(frozen=True)
class PipelinePlanner:
    """A planner for a replica of several stages."""

    schedule: Schedule
    num_stages: int

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program."""
        unlimited = replace(limits, max_microbatches=sys.maxsize)
        microbatches: list[Microbatch] = []
        for together in self._packed_together(whole_batches(queues, limits, self.num_stages)):
            microbatches += pack(together, unlimited).microbatches
        return build(self.schedule, microbatches, self.num_stages, keep_order=True)

    def _packed_together(self, queues: list[JobQueue]) -> list[list[JobQueue]]:
        """Queues whose samples may share microbatches: all, or as a schedule wants it those of a job or of a round."""
        if self.schedule is Schedule.LORAPP:
            return [[queue] for queue in queues]
        if self.schedule is Schedule.TEMPLATE:
            most = max(len(queue.batches) for queue in queues)
            return [[replace(q, batches=q.batches[n : n + 1]) for q in queues] for n in range(most)]
        return [queues]


def whole_batches(queues: Sequence[JobQueue], limits: Limits, num_stages: int) -> list[JobQueue]:
    """The queues cut to the same number of global batches, with nothing behind them."""
    most = max(len(queue.batches) for queue in queues)
    room = LENGTHENED * num_stages * limits.max_microbatches * limits.capacity
    num = 1
    while num < most and _num_tokens(queues, num + 1) <= room:
        num += 1
    return [replace(queue, batches=queue.batches[:num], is_all=True) for queue in queues]


def _num_tokens(queues: Sequence[JobQueue], num_batches: int) -> int:
    return sum(sum(batch.lengths) for queue in queues for batch in queue.batches[:num_batches])
