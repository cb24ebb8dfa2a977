"""Deals the samples of every global batch with order-independent sums out over replicas.

Problem: min max_k of the seconds that replica k computes for one global batch of every job, given what those at home
there have it do; every sample, or group of samples that share a microbatch, goes to one replica that holds it.
Method: the longest first, each to where it ends soonest (within 4/3 of the least for alike replicas, Graham 1969).
O(samples · replicas). `plan/dispatch/` shares out by an integer program what whole deployments are compared by; here
replicas have work of their own already, and a plan must be there before the next program begins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.plan.pack.greedy import pack
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment


@dataclass(frozen=True)
class DealtQueues:
    """What one replica is to run."""

    queues: list[JobQueue]
    """Of its own jobs, and of others what it has of them, their samples counted from 0."""
    indices: dict[tuple[str, int], list[int]]
    """Of global batches that were dealt out: the place of each of those samples in the whole one."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, or of the longest group that shares a microbatch."""
        return max((batch.longest for queue in self.queues for batch in queue.batches), default=0)

    def packed(self, limits: Limits) -> list[Microbatch]:
        """The same in microbatches, every sample with its place in the whole global batch."""
        found = pack(self.queues, replace(limits, max_microbatches=sys.maxsize)).microbatches if self.queues else ()
        return [Microbatch(tuple(self._named(s) for s in m.segments)) for m in found]

    def _named(self, segment: Segment) -> Segment:
        own = self.indices.get((segment.job, segment.step))
        return segment if own is None else replace(segment, index=own[segment.index])


def deal(queues: Sequence[JobQueue], speeds: Sequence[float], holds: Sequence[int]) -> list[DealtQueues]:
    """What each replica is to run of whole global batches; `speeds` are in tokens of a second.

    `holds`: the tokens that fit into a microbatch of each. Of a job that is dealt out, one global batch is given.
    """
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
    """What is dealt out in one piece: its tokens, its job, and the places of its samples in the global batch."""
    for queue in queues:
        (batch,) = queue.batches
        for own in _groups(batch):
            yield _tokens(batch, own), queue.job, own


def _groups(batch: Batch) -> list[range]:
    """The samples that stay together, by their places in the global batch."""
    first, found = batch.first, []
    for size in batch.groups or (1,) * len(batch.lengths):
        found.append(range(first, first + size))
        first += size
    return found


def _tokens(batch: Batch, own: Iterable[int]) -> int:
    return sum(batch.lengths[index - batch.first] for index in own)


def _part(batch: Batch, groups: Sequence[range]) -> tuple[Batch, list[int]]:
    """A global batch with some of its samples alone, and the places of these."""
    indices = [index for own in groups for index in own]
    lengths = tuple(batch.lengths[index - batch.first] for index in indices)
    return Batch(batch.step, 0, lengths, tuple(len(own) for own in groups) if batch.groups else ()), indices
