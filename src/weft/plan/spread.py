"""Programs for several whole replicas: assigns jobs to homes, and the samples of other jobs to replicas."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.plan.cost.learned import PassCosts
from weft.plan.cost.types import CostModel
from weft.plan.layout import copies
from weft.plan.level import PlannedReplicas
from weft.plan.pack.greedy import pack
from weft.plan.pipeline.build import renumbered, whole_batches, with_transfers
from weft.plan.pipeline.orders import Clock, Pass, Pipe, clock_of, open_pipe, play_all
from weft.plan.pipeline.stream import BatchStream, StreamBatch, read_stream
from weft.plan.planner import HomeLoad, Planner
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Step
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment


@dataclass(frozen=True)
class SpreadPlanner(Planner):
    replica_sizes: tuple[int, ...]
    costs: tuple[CostModel, ...]
    planned: PlannedReplicas | None = None
    shards: tuple[int, ...] = ()
    """How many consecutive replicas share each copy of the frozen weights; empty: none do."""

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program: whole global batches, at least one of every job."""
        whole = whole_batches(queues, limits, sum(self.replica_sizes))
        free = {
            queue.job: [batch.step for batch in queue.batches if batch.lengths] for queue in whole if queue.home is None
        }
        speeds, streams = self.speeds(limits.capacity), [list[Microbatch]() for _ in self.replica_sizes]
        holds = self.holds(limits.capacity)
        for together in _rounds(whole) if free else [whole]:
            for stream, dealt, most in zip(streams, deal(together, speeds, holds), holds, strict=True):
                stream += dealt.packed(replace(limits, capacity=max(most, dealt.longest)))
        return self.assemble(streams, free)

    def assemble(self, streams: Sequence[Sequence[Microbatch]], free: Mapping[str, Sequence[int]]) -> Program:
        """The program of the replicas' streams; `free`: steps of the jobs that all replicas train."""
        return _assembled(streams, self.replica_sizes, self.costs, free, self.shards)

    def home_seconds(self, jobs: Mapping[str, HomeLoad], capacity: int) -> dict[str, tuple[float, ...]]:
        """Seconds of a global batch of each job with a home, by replica: as planned, or else by its tokens."""
        known = {} if self.planned is None else self.planned.home_s
        speeds, holds = self.speeds(capacity), self.holds(capacity)
        largest = max(holds)
        seconds = {job: known[job] for job in known if job in jobs}
        for job, load in jobs.items():
            fits = [load.longest <= most or most == largest for most in holds]
            own = (load.step_tokens / speed if fit else math.inf for speed, fit in zip(speeds, fits, strict=True))
            seconds.setdefault(job, tuple(own))
        return seconds

    def open_pipes(self, capacity: int) -> list[Pipe]:
        if len(self.replica_sizes) == 1 or self.shards:
            return []
        return [open_pipe(size, max_lead=max_lead(size)) for size in self.replica_sizes]

    @property
    def pass_costs(self) -> Sequence[PassCosts]:
        return [(cost, None) for cost in self.costs]

    def holds(self, capacity: int) -> list[int]:
        planned = self.planned
        return [capacity if planned is None else min(capacity, planned.holds[k]) for k, _ in enumerate(self.costs)]

    def speeds(self, capacity: int) -> list[float]:
        found = []
        for size, cost in zip(self.replica_sizes, self.costs, strict=True):
            stages = range(size)
            slowest = max(cost.forward_s([capacity], s) + cost.backward_s([capacity], s) for s in stages)
            found.append(capacity / slowest)
        return found


def _rounds(queues: Sequence[JobQueue]) -> list[list[JobQueue]]:
    most = max(len(queue.batches) for queue in queues)
    return [[replace(q, batches=q.batches[n : n + 1]) for q in queues if n < len(q.batches)] for n in range(most)]


def _assembled(
    given: Sequence[Sequence[Microbatch]],
    replica_sizes: Sequence[int],
    costs: Sequence[CostModel],
    free: Mapping[str, Sequence[int]],
    shards: Sequence[int] = (),
) -> Program:
    before = {(job, step): (job, earlier) for job, own in free.items() for earlier, step in itertools.pairwise(own)}

    def needs(microbatch: Microbatch) -> list[StreamBatch]:
        return [before[batch] for batch in _shared(microbatch, free) if batch in before]

    aligned = align(given, shards, lambda microbatch: _shared(microbatch, free), needs) if shards else given
    streams = [read_stream(stream) for stream in aligned]
    owners = copies(len(streams), shards)
    pipes = [
        _joint([_pipe(streams[k], replica_sizes[k], costs[k], free.keys(), before) for k in own]) for own in owners
    ]
    played = [stages for own, stages in zip(owners, play_all(pipes), strict=True) for _ in own]
    due = _due(streams, played, free)
    order = sorted(
        (one.start_s, replica, one.clock)
        for replica, stages in enumerate(played)
        for one in stages[0]
        if not one.is_backward
    )
    numbers = [[[0]] * len(stream.microbatches) for stream in streams]
    for number, (_, replica, k) in enumerate(order):
        numbers[replica][k] = [number]
    microbatches = tuple(streams[replica].microbatches[k] for _, replica, k in order)
    lists: list[tuple[Instruction, ...]] = []
    for replica, (stream, stages) in enumerate(zip(streams, played, strict=True)):
        first = len(lists)
        for index, passes in enumerate(stages):
            visits = [Backward(p.clock) if p.is_backward else Forward(p.clock) for p in passes]
            own = with_transfers(stream, visits, index, len(stages), measures=True)
            rooted = [batch for batch, (_, root) in due.items() if index == 0 and root == replica]
            own = _with_steps(own, passes, stream, due, free, rooted)
            lists.append(tuple(each for i in own for each in renumbered(i, numbers[replica], first)))
    return Program(microbatches, tuple(lists), replica_sizes=tuple(replica_sizes), shards=tuple(shards))


def _joint(pipes: Sequence[Pipe]) -> Pipe:
    """One pipe for stages that run in step, with the n-th microbatch of each replica."""
    first = pipes[0]
    if len(pipes) == 1:
        return first
    return replace(
        first,
        clocks=[_slowest(together) for together in zip(*(pipe.clocks for pipe in pipes), strict=True)],
        waits_for=[max(together) for together in zip(*(pipe.waits_for for pipe in pipes), strict=True)],
        shared=[list(itertools.chain(*together)) for together in zip(*(pipe.shared for pipe in pipes), strict=True)],
        needs=[list(itertools.chain(*together)) for together in zip(*(pipe.needs for pipe in pipes), strict=True)],
    )


def _slowest(clocks: Sequence[Clock]) -> Clock:
    return Clock(
        tuple(map(max, *(clock.forward_s for clock in clocks))),
        tuple(map(max, *(clock.backward_s for clock in clocks))),
        tuple(map(max, *(clock.held_bytes for clock in clocks))),
        max(clock.transfer_s for clock in clocks),
        tuple(map(max, *(clock.step_s for clock in clocks))),
    )


def _pipe(
    stream: BatchStream,
    num_stages: int,
    cost: CostModel,
    free: Collection[str],
    before: Mapping[StreamBatch, StreamBatch],
) -> Pipe:
    """The microbatches of a replica, and the global batches for which it waits for others."""
    num_steps = {k: len(batches) for k, batches in stream.completes.items()}
    shared = [_shared(m, free) for m in stream.microbatches]
    return Pipe(
        [clock_of(m, num_steps.get(k, 0), num_stages, cost) for k, m in enumerate(stream.microbatches)],
        num_stages,
        stream.waits_for,
        max_lead=max_lead(num_stages),
        shared=shared,
        needs=[[before[batch] for batch in own if batch in before] for own in shared],
    )


def max_lead(num_stages: int) -> list[int]:
    return [2 * num_stages] * num_stages


def _shared(microbatch: Microbatch, free: Collection[str]) -> list[StreamBatch]:
    return sorted({(s.job, s.step) for s in microbatch.segments if s.job in free})


def _due(
    streams: Sequence[BatchStream], played: Sequence[Sequence[Sequence[Pass]]], free: Mapping[str, Sequence[int]]
) -> dict[StreamBatch, tuple[float, int]]:
    """When each shared global batch has been backward everywhere, and the first replica that has part of it."""
    due: dict[StreamBatch, tuple[float, int]] = {}
    for replica, (stream, stages) in enumerate(zip(streams, played, strict=True)):
        for one in stages[0]:
            for batch in _shared(stream.microbatches[one.clock], free) if one.is_backward else ():
                end, root = due.get(batch, (0.0, replica))
                due[batch] = (max(end, one.end_s), root)
    return dict(sorted(due.items(), key=lambda item: (item[1][0], item[0])))


def _with_steps(
    given: Sequence[Instruction],
    passes: Sequence[Pass],
    stream: BatchStream,
    due: Mapping[StreamBatch, tuple[float, int]],
    free: Mapping[str, Sequence[int]],
    rooted: Sequence[StreamBatch],
) -> list[Instruction]:
    """A stage's list with the steps of shared jobs: before their next forward, or once their norm is known here."""
    result: list[Instruction] = []
    left = {job: list(own) for job, own in free.items()}

    def step_until(job: str, step: int) -> None:
        while left[job] and left[job][0] < step:
            result.append(Step(job, left[job].pop(0)))

    measuring, running = list(rooted), iter(passes)
    for i in given:
        if isinstance(i, Step) and i.job in free:
            continue
        if isinstance(i, Measure) and (i.job, i.step) in rooted:
            continue
        if isinstance(i, Forward | Backward):
            now = next(running).start_s
            while measuring and due[measuring[0]][0] <= now:
                job, step = measuring.pop(0)
                step_until(job, step)
                result.append(Measure(job, step))
                step_until(job, step + 1)
            if isinstance(i, Forward):
                for job, step in _shared(stream.microbatches[i.microbatch], free):
                    step_until(job, step)
        result.append(i)
    for job, step in due:
        if (job, step) in measuring:
            step_until(job, step)
            result.append(Measure(job, step))
        step_until(job, step + 1)
    return result


@dataclass(frozen=True)
class DealtQueues:
    queues: list[JobQueue]
    """Its own jobs, and its parts of divided jobs, whose samples are counted from 0."""
    indices: dict[tuple[str, int], list[int]]
    """By divided global batch, the index of each of its samples in the whole batch."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, or of the longest group that shares a microbatch."""
        return max((batch.longest for queue in self.queues for batch in queue.batches), default=0)

    def packed(self, limits: Limits) -> list[Microbatch]:
        """The microbatches, with each sample's index in the whole global batch."""
        found = pack(self.queues, replace(limits, max_microbatches=sys.maxsize)).microbatches if self.queues else ()
        return [Microbatch(tuple(self._named(s) for s in m.segments)) for m in found]

    def _named(self, segment: Segment) -> Segment:
        own = self.indices.get((segment.job, segment.step))
        return segment if own is None else replace(segment, index=own[segment.index])


def deal(queues: Sequence[JobQueue], speeds: Sequence[float], holds: Sequence[int]) -> list[DealtQueues]:
    """Assigns whole global batches to replicas; a divided job has one global batch. `speeds`: tokens per second;
    `holds`: tokens of the largest microbatch of each replica."""
    found = [DealtQueues([], {}) for _ in speeds]
    seconds = [0.0] * len(speeds)
    for queue in queues:
        if queue.home is not None:
            found[queue.home].queues.append(queue)
            seconds[queue.home] += sum(sum(batch.lengths) for batch in queue.batches) / speeds[queue.home]
    free = {queue.job: queue for queue in queues if queue.home is None}
    shares: dict[str, list[list[range]]] = {job: [[] for _ in speeds] for job in free}
    for num_tokens, job, own in sorted(_waiting(free.values()), key=lambda each: (-each[0], each[1], each[2].start)):
        least = min(num_tokens, max(holds))
        ends = [(seconds[k] + num_tokens / speed, k) for k, speed in enumerate(speeds) if holds[k] >= least]
        end, taker = min(ends)
        seconds[taker] = end
        shares[job][taker].append(own)
    for job, by_replica in shares.items():
        (batch,) = free[job].batches
        for dealt, groups in zip(found, by_replica, strict=True):
            if groups:
                part, dealt.indices[job, batch.step] = _part(batch, sorted(groups, key=lambda own: own.start))
                dealt.queues.append(replace(free[job], batches=(part,)))
    return found


def _waiting(queues: Iterable[JobQueue]) -> Iterator[tuple[int, str, range]]:
    """The pieces to assign: tokens, job, and the indices of the samples in the global batch."""
    for queue in queues:
        (batch,) = queue.batches
        for own in _groups(batch):
            yield _tokens(batch, own), queue.job, own


def _groups(batch: Batch) -> list[range]:
    first, found = batch.first, []
    for size in batch.groups or (1,) * len(batch.lengths):
        found.append(range(first, first + size))
        first += size
    return found


def _tokens(batch: Batch, own: Iterable[int]) -> int:
    return sum(batch.lengths[index - batch.first] for index in own)


def _part(batch: Batch, groups: Sequence[range]) -> tuple[Batch, list[int]]:
    """A global batch reduced to some of its samples, and their indices."""
    indices = [index for own in groups for index in own]
    lengths = tuple(batch.lengths[index - batch.first] for index in indices)
    return Batch(batch.step, 0, lengths, tuple(len(own) for own in groups) if batch.groups else ()), indices


Batches = Callable[[Microbatch], Collection[StreamBatch]]


def align(
    streams: Sequence[Sequence[Microbatch]], shards: Sequence[int], shared: Batches, needs: Batches
) -> list[list[Microbatch]]:
    """The streams, padded with empty microbatches so that those of each copy of the frozen weights have equal length.
    `shared`: the global batches of a microbatch that have samples on other replicas; `needs`: those that must have been
    backward everywhere before."""
    left = Counter(batch for stream in streams for microbatch in stream for batch in shared(microbatch))
    found: list[list[Microbatch]] = [[] for _ in streams]
    positions = [0] * len(streams)
    owners = copies(len(streams), shards)
    while True:
        ready = [
            at < len(stream) and not any(left[batch] for batch in needs(stream[at]))
            for stream, at in zip(streams, positions, strict=True)
        ]
        if not any(ready):
            break
        ran: list[Microbatch] = []
        for own in owners:
            for replica in own if any(ready[replica] for replica in own) else ():
                found[replica].append(streams[replica][positions[replica]] if ready[replica] else Microbatch(()))
                positions[replica] += ready[replica]
                ran.append(found[replica][-1])
        for microbatch in ran:
            left.subtract(shared(microbatch))
    assert positions == [len(stream) for stream in streams], "global batches come in the same order everywhere"
    return found
