"""From tasks to a pipeline template: which tasks are fused, which fused tasks share a clock, and in which order.

Problem: min makespan of one global batch of every task on the pipeline. The latency that fusion minimises is a model of
it that leaves out most of filling and draining the pipeline. So two partitions are kept: the one of least latency and,
of the best for 1, 2, … fused tasks, the one whose template takes the least time. For both, and for every number of
buckets P from one to one per task, buckets of even first-stage seconds are formed (`plan/level.py`) and their template
is simulated. The least makespan wins, ties to the first; a P with a bucket that does not fit in memory is skipped.

Complexity: fusion, plus 3 n templates of O(S · P · C) passes. Tests prove the result never slower than any bucketing of
the partition of least latency, and that every task is in it exactly once.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.fuse.tasks import FusedTask, FuseTask, Fusion, Pipe, fuse_by_count
from weft.plan.level import choose_homes
from weft.plan.pack.greedy import pack
from weft.plan.pipeline.orders import Clock, Pass, play
from weft.plan.pipeline.stream import slowest_first
from weft.plan.types import JobQueue, Limits, Microbatch


@dataclass(frozen=True, slots=True)
class FusionPlan:
    fusion: Fusion
    template: Template


def plan_fusion(tasks: Sequence[FuseTask], pipe: Pipe) -> FusionPlan:
    fusions = fuse_by_count(tasks, pipe)
    modelled = min(fusions, key=lambda f: f.latency_s)
    played = min(fusions, key=lambda f: build_template(f.fused, [(i,) for i in range(len(f.fused))], pipe).makespan_s)
    plans = [
        FusionPlan(fusion, template)
        for fusion in ([modelled, played] if played is not modelled else [modelled])
        for template in bucket_templates(fusion, pipe)
    ]
    return min(plans, key=lambda p: p.template.makespan_s)


def bucket_templates(fusion: Fusion, pipe: Pipe) -> Iterator[Template]:
    """The template of the most even buckets, for every number of buckets that fits in memory."""
    fused = fusion.fused
    weights = [pipe.forward_s(f, 0) for f in fused]
    for num_buckets in range(1, len(fused) + 1):
        buckets = even_buckets(weights, num_buckets)
        if all(fits_alone([fused[i] for i in bucket], pipe) for bucket in buckets):
            yield build_template(fused, buckets, pipe)


def even_buckets(weights: Sequence[float], num_buckets: int) -> list[tuple[int, ...]]:
    """Items by number in buckets of even weight, ordered by their first item; empty ones are left out."""
    bucket_of = choose_homes({i: (weight,) * num_buckets for i, weight in enumerate(weights)})
    buckets = [tuple(i for i in range(len(weights)) if bucket_of[i] == k) for k in range(num_buckets)]
    return sorted(bucket for bucket in buckets if bucket)


@dataclass(frozen=True)
class GroupedStream:
    groups: tuple[tuple[str, ...], ...]
    fills: tuple[int, ...]
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True)
class PipeCosts:
    num_stages: int
    cost: CostModel
    adapters: AdapterTimes | None = None
    """Adapter times beyond the cost model; None if unknown."""
    row_tile: int = 1


def grouped_streams(queues: Sequence[JobQueue], capacity: int, costs: PipeCosts) -> Iterator[GroupedStream]:
    """Streams for every number of pieces that leads to other groups, in microbatches of one piece and in full ones.
    `queues` hold whole global batches."""
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
    """The fewest pieces that fit, twice as many, and those that fill a pipeline with one group."""
    most = max(sum(queue.batches[0].lengths) for queue in queues)
    fewest = -(-most // capacity)
    return sorted({fewest, 2 * fewest, max(fewest, num_stages), max(fewest, 2 * num_stages)})


def _task(queue: JobQueue, num_pieces: int, capacity: int, adapters: AdapterTimes | None) -> FuseTask:
    lengths = list(queue.batches[0].lengths[::num_pieces])
    while len(lengths) > 1 and sum(lengths) > capacity:
        lengths.pop()
    seconds = 0.0 if adapters is None else adapters.seconds(queue.job, sum(lengths))
    return FuseTask(queue.job, tuple(lengths), adapter_s=seconds)


def _fill(queues: Sequence[JobQueue], jobs: Sequence[str], num_pieces: int, capacity: int, row_tile: int) -> int:
    """Tokens of a group's microbatch, in whole tiles, at least its longest sample."""
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
            turns = itertools.zip_longest(*(packed[i] for i in bucket))
            stream += [microbatch for turn in turns for microbatch in turn if microbatch is not None]
    return tuple(stream)


def _packed(queues: Sequence[JobQueue], number: int, fill: int) -> tuple[Microbatch, ...]:
    if not queues:
        return ()
    own = [replace(queue, batches=queue.batches[number : number + 1], is_all=True) for queue in queues]
    return tuple(pack(own, Limits(fill, sys.maxsize)).microbatches)


@dataclass(frozen=True, slots=True)
class Template:
    """The order of the buckets' clocks, one per microbatch, and the passes of each stage.

    All fused tasks of a bucket run one microbatch each within one clock of the pipeline. Problem: min makespan subject
    to every stage holding at most its free bytes between forwards and backwards. Rules, in the spirit of 1F1B:

    1. Buckets go by the time of a clock on the first stage, longest first: a shorter one fills the bubbles of a longer
       one (`stream.slowest_first`).
    2. The clocks of one bucket follow each other.
    3. A stage runs a backward as soon as it is ready, and otherwise the next forward, as early as memory allows
       (`orders.play`, as for any pipeline's program).

    Tests prove that memory stays in its limits, and, for equal stages, forward = backward and enough memory, that the
    last stage never idles between its first forward and its last backward.
    """

    buckets: tuple[tuple[int, ...], ...]
    """Indices of the fused tasks in each bucket; buckets are in the order in which they run."""
    stages: tuple[tuple[Pass, ...], ...]

    @property
    def makespan_s(self) -> float:
        return max(passes[-1].end_s for passes in self.stages)


def build_template(fused: Sequence[FusedTask], buckets: Sequence[Sequence[int]], pipe: Pipe) -> Template:
    """The template of these buckets, which have each fused task once, for one global batch of every task."""
    costs = {bucket: _clock([fused[i] for i in bucket], pipe) for bucket in map(tuple, buckets)}
    ordered = slowest_first({bucket: clock.forward_s[0] for bucket, clock in costs.items()})
    clocks = [costs[bucket] for bucket in ordered for _ in range(pipe.num_microbatches)]
    stages = play(clocks, pipe.num_stages, pipe.free_bytes)
    return Template(tuple(ordered), tuple(map(tuple, stages)))


def fits_alone(fused: Sequence[FusedTask], pipe: Pipe) -> bool:
    """True if one clock of these fused tasks fits on every stage."""
    held = _clock(fused, pipe).held_bytes
    return pipe.free_bytes is None or all(h <= free for h, free in zip(held, pipe.free_bytes, strict=True))


def _clock(fused: Sequence[FusedTask], pipe: Pipe) -> Clock:
    stages = range(pipe.num_stages)
    return Clock(
        forward_s=tuple(sum(pipe.forward_s(f, s) for f in fused) for s in stages),
        backward_s=tuple(sum(pipe.backward_s(f, s) for f in fused) for s in stages),
        held_bytes=tuple(sum(pipe.cost.held_bytes(f.lengths, s) for f in fused) for s in stages),
        transfer_s=pipe.cost.transfer_s(sum(f.num_tokens for f in fused)),
        step_s=(0.0,) * pipe.num_stages,
    )
