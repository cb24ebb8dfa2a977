"""Deals the samples of a step to the replicas of a run: `dispatch.py` for real samples and measured replicas.

A step is one global batch of every job. Its samples, or groups that share a microbatch, are put into buckets by length;
a rule decides how many of each bucket every replica gets. Replicas are priced by their cost models: those of the
hardware table, or those learnt from the passes that they have run. No result depends on the rule.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.plan.cost.types import CostModel, slot_seconds
from weft.plan.deploy.buckets import BucketCosts, Buckets, FloatArray, IntArray, choose_buckets, fixed_buckets
from weft.plan.deploy.dispatch import balanced_counts, cheapest_counts, even_counts
from weft.plan.deploy.fleet import Fleet
from weft.plan.layout import DispatchRule, ReplicaLayout
from weft.plan.pack.greedy import pack
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment

COUNTS: Mapping[DispatchRule, Callable[[Fleet], IntArray]] = {
    DispatchRule.BALANCED: balanced_counts,
    DispatchRule.LENGTH: cheapest_counts,
    DispatchRule.EVEN: even_counts,
}
FINENESS = 256
"""Different lengths that buckets are chosen from; more would take long."""
PROBES = 16
"""Samples of the full chunk by which the fixed part of a chunk's time is found."""


@dataclass(frozen=True)
class PricedReplica:
    """A replica of a run, with chunks packed as the run packs them."""

    layout: ReplicaLayout
    most_tokens: int
    cost: CostModel
    is_packed: bool = True
    adapter_token_s: float = 0.0
    """Seconds per token that adapters add to `cost`, on average over the jobs."""
    adapters_s: float = 0.0
    """Seconds per chunk that the adapters of all jobs add to `cost`."""

    def costs(self, buckets: Buckets) -> BucketCosts:
        """Seconds on the slowest stage. A bucket's price is that of a full chunk of it, so attention's quadratic part
        and rows of padding are in it."""
        mean = np.asarray(buckets.tokens) / np.asarray(buckets.counts)
        # As many tokens of this length have the bucket's Σ length² too.
        lengths = np.maximum(1, np.rint(np.asarray(buckets.pairs) / np.asarray(buckets.tokens))).astype(np.int64)
        fixed_s = self._fixed_s()
        slope = mean * np.array([self._token_s(int(length), fixed_s) for length in lengths])
        size = np.where(np.asarray(buckets.bounds) <= self.most_tokens, self.most_tokens / mean, 0.0)
        return BucketCosts(slope, np.full(len(mean), fixed_s), size)

    def _token_s(self, length: int, fixed_s: float) -> float:
        count = max(1, self.most_tokens // length)
        return max(0.0, self._chunk_s(count, length) - fixed_s) / (count * length)

    def _fixed_s(self) -> float:
        length = max(1, self.most_tokens // PROBES)
        return max(0.0, 2 * self._chunk_s(PROBES // 2, length) - self._chunk_s(PROBES, length))

    def _chunk_s(self, count: int, length: int) -> float:
        added_s = self.adapters_s + count * length * self.adapter_token_s
        return slot_seconds(self.cost, self.layout.stages, [length] * count) + added_s


@dataclass(frozen=True)
class DealtQueues:
    queues: list[JobQueue]
    """Queues of the replica: its own jobs, and its parts of divided jobs, whose samples are counted from 0."""
    indices: dict[tuple[str, int], list[int]]
    """Index in the whole global batch of each sample of a divided one."""

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


def deal(queues: Sequence[JobQueue], replicas: Sequence[PricedReplica], rule: DispatchRule) -> list[DealtQueues]:
    """Assigns whole global batches to replicas; a divided job has one global batch."""
    found = [DealtQueues([], {}) for _ in replicas]
    at_home = [queue for queue in queues if queue.home is not None]
    for queue in at_home:
        assert queue.home is not None, "it is at home"
        found[queue.home].queues.append(queue)
    free = {queue.job: queue for queue in queues if queue.home is None}
    shares: dict[str, list[list[range]]] = {job: [[] for _ in replicas] for job in free}
    pieces = list(_pieces(free.values()))
    for piece, taker in _takers(pieces, at_home, replicas, rule):
        shares[piece.job][taker].append(piece.own)
    for job, by_replica in shares.items():
        (batch,) = free[job].batches
        for dealt, groups in zip(found, by_replica, strict=True):
            if groups:
                part, dealt.indices[job, batch.step] = _part(batch, sorted(groups, key=lambda own: own.start))
                dealt.queues.append(replace(free[job], batches=(part,)))
    return found


@dataclass(frozen=True)
class _Piece:
    """A sample, or a group of samples that share a microbatch."""

    job: str
    own: range
    """Indices of its samples in the global batch."""
    tokens: int
    pairs: int
    """Σ length² of its samples."""


def _takers(
    pieces: Sequence[_Piece], at_home: Sequence[JobQueue], replicas: Sequence[PricedReplica], rule: DispatchRule
) -> Iterator[tuple[_Piece, int]]:
    """Each piece with the replica that gets it."""
    if not pieces:
        return
    homes = [list(_pieces([queue])) for queue in at_home]
    buckets = _in_buckets([*pieces, *itertools.chain(*homes)], [replica.most_tokens for replica in replicas])
    longest = buckets.bounds[-1]
    buckets = buckets.with_homes([min(piece.tokens, longest) for piece in own] for own in homes)
    counts_KR = COUNTS[rule](fleet := Fleet(replicas, buckets, [queue.home or 0 for queue in at_home]))
    given_KR = counts_KR - fleet.at_home_KR
    by_bucket: list[list[_Piece]] = [[] for _ in buckets.bounds]
    for piece in sorted(pieces, key=lambda each: (-each.tokens, each.job, each.own.start)):
        by_bucket[buckets.indices_of([min(piece.tokens, longest)])[0]].append(piece)
    for own, counts_K in zip(by_bucket, given_KR.T, strict=True):
        yield from zip(own, _interleaved(counts_K.tolist()), strict=True)


def _interleaved(counts: Sequence[int]) -> Iterator[int]:
    """Each index so many times, evenly mixed: the samples of a bucket differ a little, and come in order of length."""
    turns = (((2 * n + 1) / (2 * count), k) for k, count in enumerate(counts) for n in range(count))
    return (k for _, k in sorted(turns))


def _in_buckets(pieces: Sequence[_Piece], holds: Sequence[int]) -> Buckets:
    """Buckets of their lengths. What a replica holds is a bound, and what is too long for all counts as the longest."""
    most = max(holds)
    lengths = [min(piece.tokens, most) for piece in pieces]
    chosen = choose_buckets(lengths, grain=-(-max(lengths) // FINENESS))
    bounds = {min(bound, most) for bound in chosen.bounds}
    found = fixed_buckets(lengths, sorted(bounds.union(holds)))
    indices = found.indices_of(lengths)

    def sums(values: Iterable[int]) -> FloatArray:
        return np.bincount(indices, np.fromiter(values, np.float64), len(found.bounds)).astype(np.float64)

    return replace(found, tokens=tuple(sums(p.tokens for p in pieces)), pairs=tuple(sums(p.pairs for p in pieces)))


def _pieces(queues: Iterable[JobQueue]) -> Iterator[_Piece]:
    for queue in queues:
        for batch in queue.batches:
            first = batch.first
            for size in batch.groups or (1,) * len(batch.lengths):
                own = range(first, first + size)
                lengths = [batch.lengths[index - batch.first] for index in own]
                yield _Piece(queue.job, own, sum(lengths), sum(length * length for length in lengths))
                first += size


def _part(batch: Batch, groups: Sequence[range]) -> tuple[Batch, list[int]]:
    """A global batch reduced to some of its samples, and their indices."""
    indices = [index for own in groups for index in own]
    lengths = tuple(batch.lengths[index - batch.first] for index in indices)
    return Batch(batch.step, 0, lengths, tuple(len(own) for own in groups) if batch.groups else ()), indices
