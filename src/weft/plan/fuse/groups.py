"""Streams of real jobs whose groups were chosen by fusion: who shares microbatches, how full, in which order.

Fusion plans with one microbatch of every job, of which a global batch has C (`tasks.py`). Here C is chosen too: for
each of a few, the jobs' next global batches are cut into C like pieces, fused, put into buckets and into the template's
order (`planner.py`). That gives groups, the tokens that a microbatch of each is filled up to, and the order in which
they enter the pipeline: round by round, bucket by bucket, in a bucket in turn. Within a group samples are packed
greedily, every job in its own order, so no plan changes a bit. Filling less than the capacity changes none either:
rows are computed in tiles of the same size.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.fuse.planner import FusionPlan, plan_fusion
from weft.plan.fuse.tasks import FuseTask, Pipe
from weft.plan.pack.greedy import pack
from weft.plan.types import JobQueue, Limits, Microbatch


@dataclass(frozen=True)
class GroupedStream:
    """Microbatches in the order in which they enter a pipeline, each of jobs of one group."""

    groups: tuple[tuple[str, ...], ...]
    fills: tuple[int, ...]
    """Tokens that a microbatch of each group is filled up to."""
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True)
class PipeCosts:
    """What fusion knows of the stages."""

    num_stages: int
    cost: CostModel
    adapters: AdapterTimes | None = None
    """None: nothing is known of them beyond the cost model."""
    row_tile: int = 1


def grouped_streams(queues: Sequence[JobQueue], capacity: int, costs: PipeCosts) -> Iterator[GroupedStream]:
    """Streams for every number of pieces that leads to other groups: of microbatches that hold a piece, and full ones.

    `queues` hold whole global batches.
    """
    seen = set()
    for num_pieces in _numbers_of_pieces(queues, capacity, costs.num_stages):
        tasks = [_task(queue, num_pieces, capacity, costs.adapters) for queue in queues]
        free = [
            (costs.num_stages - stage) * costs.cost.held_bytes([capacity], stage) for stage in range(costs.num_stages)
        ]
        plan = plan_fusion(tasks, Pipe(costs.cost, costs.num_stages, num_pieces, tuple(max(1, size) for size in free)))
        groups = tuple(fused.jobs for fused in plan.fusion.fused)
        even = tuple(_fill(queues, jobs, num_pieces, capacity, costs.row_tile) for jobs in groups)
        for fills in (even, (capacity,) * len(groups)):
            if (groups, fills) not in seen:
                seen.add((groups, fills))
                yield GroupedStream(groups, fills, _stream(queues, plan, fills))


def _numbers_of_pieces(queues: Sequence[JobQueue], capacity: int, num_stages: int) -> list[int]:
    """The fewest that hold a job's piece, twice as many, and what fills a pipeline with one group."""
    most = max(sum(queue.batches[0].lengths) for queue in queues)
    fewest = -(-most // capacity)
    return sorted({fewest, 2 * fewest, max(fewest, num_stages), max(fewest, 2 * num_stages)})


def _task(queue: JobQueue, num_pieces: int, capacity: int, adapters: AdapterTimes | None) -> FuseTask:
    """A job with a typical piece of its next global batch."""
    lengths = list(queue.batches[0].lengths[::num_pieces])
    while len(lengths) > 1 and sum(lengths) > capacity:
        lengths.pop()
    seconds = 0.0 if adapters is None else adapters.seconds(queue.job, sum(lengths))
    return FuseTask(queue.job, tuple(lengths), adapter_s=seconds)


def _fill(queues: Sequence[JobQueue], jobs: Sequence[str], num_pieces: int, capacity: int, row_tile: int) -> int:
    """Tokens of a microbatch of a group, in whole tiles; never too few for a sample."""
    batches = [batch for queue in queues if queue.job in jobs for batch in queue.batches]
    longest = max(max(batch.lengths) for batch in batches)
    tokens = sum(sum(queue.batches[0].lengths) for queue in queues if queue.job in jobs)
    wanted = max(longest, -(-tokens // num_pieces))
    return min(capacity, -(-wanted // row_tile) * row_tile)


def _stream(queues: Sequence[JobQueue], plan: FusionPlan, fills: Sequence[int]) -> tuple[Microbatch, ...]:
    members = [[queue for queue in queues if queue.job in fused.jobs] for fused in plan.fusion.fused]
    stream: list[Microbatch] = []
    for number in range(max(len(queue.batches) for queue in queues)):
        packed = [
            _packed([q for q in own if len(q.batches) > number], number, fill)
            for own, fill in zip(members, fills, strict=True)
        ]
        for bucket in plan.template.buckets:
            turns = itertools.zip_longest(*(packed[place] for place in bucket))
            stream += [microbatch for turn in turns for microbatch in turn if microbatch is not None]
    return tuple(stream)


def _packed(queues: Sequence[JobQueue], number: int, fill: int) -> tuple[Microbatch, ...]:
    """One global batch of every job of a group."""
    if not queues:
        return ()
    own = [replace(queue, batches=queue.batches[number : number + 1], is_all=True) for queue in queues]
    return tuple(pack(own, Limits(fill, sys.maxsize)).microbatches)
