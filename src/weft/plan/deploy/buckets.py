"""Lengths that samples are padded to: bucket bounds with the least padding, by dynamic programming.

Bounds are multiples of `grain`. Of the U intervals between multiples that hold a sample, with upper bounds u and n
samples each, the first i fall into at most j buckets with the fewest padded tokens

    F(i, j) = min over i' < i of  F(i', j − 1) + u_i · (samples of the intervals i' + 1 … i),      F(0, j) = 0

which is LobRA's equation 4 plus the tokens themselves, a constant. O(B + R·U²) for B samples and R buckets, as matrix
operations. Tests compare it with brute force. Among equals the lowest bounds win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.errors import PlanError
from weft.plan.cost.fit import PaddedTime
from weft.plan.layout import ReplicaLayout

NUM_BUCKETS = 16
"""LobRA's choice: more hardly reduce padding."""
GRAIN = 64
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Buckets:
    bounds: tuple[int, ...]
    """Padded length of each bucket, rising."""
    counts: tuple[float, ...]
    tokens: tuple[float, ...]
    """Σ length of each bucket's samples."""
    pairs: tuple[float, ...]
    """Σ length² of each bucket's samples."""
    at_home: tuple[tuple[int, ...], ...] = ()
    """Samples of each job that has a home replica, by bucket; they are included in `counts`."""

    def indices_of(self, lengths: Sequence[int]) -> list[int]:
        found: list[int] = np.searchsorted(self.bounds, lengths).tolist()
        return found

    def with_homes(self, jobs: Iterable[Sequence[int]]) -> Buckets:
        """The same buckets, with the lengths of each job whose samples stay together."""
        counts = (np.bincount(self.indices_of(lengths), minlength=len(self.bounds)) for lengths in jobs)
        return replace(self, at_home=tuple(tuple(own.tolist()) for own in counts))


def choose_buckets(lengths: Sequence[int], num_buckets: int = NUM_BUCKETS, grain: int = GRAIN) -> Buckets:
    _check(lengths, num_buckets, grain)
    uppers_U, counts_U = np.unique(-(-np.asarray(lengths) // grain) * grain, return_counts=True)
    bounds = uppers_U[_last_intervals(uppers_U, counts_U, num_buckets)]
    return fixed_buckets(lengths, bounds.tolist())


def fixed_buckets(lengths: Sequence[int], bounds: Sequence[int]) -> Buckets:
    """The samples in buckets with given bounds; empty ones are left out."""
    if max(lengths) > max(bounds):
        raise PlanError(f"a sample has {max(lengths):,} tokens; the largest bound is {max(bounds):,}.", where="bounds")
    ascending = sorted(bounds)
    sums_3R = bucket_sums(lengths, ascending)
    used = np.flatnonzero(sums_3R[0])
    counts, tokens, pairs = (tuple(float(x) for x in own[used]) for own in sums_3R)
    return Buckets(tuple(ascending[i] for i in used), counts, tokens, pairs)


def bucket_sums(lengths: Sequence[int], bounds: Sequence[int]) -> FloatArray:
    known = np.asarray(lengths, dtype=np.float64)
    bucket = np.searchsorted(bounds, known)
    return np.stack([np.bincount(bucket, weights, len(bounds)) for weights in (None, known, known * known)])


def _last_intervals(uppers_U: npt.NDArray[np.int64], counts_U: npt.NDArray[np.int64], num_buckets: int) -> list[int]:
    num = len(uppers_U)
    below = np.concatenate([[0], np.cumsum(counts_U)])
    # Row i', column i: one bucket holds the intervals i' + 1 … i + 1.
    padded = (below[None, 1:] - below[:-1, None]) * uppers_U.astype(np.float64)
    padded[np.tril_indices(num, -1)] = np.inf
    best = np.concatenate([[0.0], np.full(num, np.inf)])
    choices = []
    for _ in range(min(num_buckets, num)):
        through = best[:-1, None] + padded
        choice = np.argmin(through, axis=0)
        choices.append(choice)
        best = np.concatenate([[0.0], through[choice, np.arange(num)]])
    ends, last = [], num
    for choice in reversed(choices):
        if last == 0:
            break
        ends.append(last - 1)
        last = int(choice[last - 1])
    return ends[::-1]


def _check(lengths: Sequence[int], num_buckets: int, grain: int) -> None:
    if num_buckets < 1 or grain < 1:
        raise PlanError(f"num_buckets is {num_buckets} and grain {grain}; both must be at least 1.", where="buckets")
    if len(lengths) == 0 or min(lengths) < 1:
        shortest = min(lengths, default=None)
        raise PlanError(
            f"got {len(lengths)} samples, the shortest of {shortest} tokens; use at least 1 of at least 1.",
            where="buckets",
        )


@dataclass(frozen=True)
class BucketCosts:
    slope_R: FloatArray
    base_R: FloatArray
    size_R: FloatArray
    """Samples of a full chunk, whole ones unless packed; 0 if the replica cannot hold one."""

    @property
    def sample_s_R(self) -> FloatArray:
        """Seconds of a sample in full chunks, the least possible; infinite where it does not fit."""
        size = np.maximum(self.size_R, 1.0)
        return np.where(self.size_R > 0, self.slope_R + self.base_R / size, np.inf)

    @property
    def alone_s_R(self) -> FloatArray:
        """Seconds of a chunk with one sample; infinite where it does not fit."""
        return np.where(self.size_R > 0, self.slope_R + self.base_R, np.inf)


class ReplicaModel(Protocol):
    @property
    def layout(self) -> ReplicaLayout: ...

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest chunk, and so of the longest sample, that it holds."""

    @property
    def is_packed(self) -> bool:
        """True if chunks mix samples of different lengths without padding."""

    def costs(self, buckets: Buckets) -> BucketCosts: ...


@dataclass(frozen=True)
class ReplicaTime:
    """A replica whose time was fitted as in LobRA's appendix D."""

    layout: ReplicaLayout
    most_tokens: int
    time: PaddedTime
    num_layers: int
    is_packed: bool = False

    def costs(self, buckets: Buckets) -> BucketCosts:
        """Costs of samples padded to the bounds or, packed, of their mean length."""
        c1, c2, c3, c4, c5, c6 = (c * self.num_layers / self.layout.stages for c in self.time.coefficients)
        bounds = np.asarray(buckets.bounds, dtype=np.float64)
        size = self.most_tokens // bounds
        if not self.is_packed:
            return BucketCosts(c1 * bounds**2 + c3 * bounds + c5, c2 * bounds**2 + c4 * bounds + c6, size)
        counts = np.asarray(buckets.counts)
        mean, pairs = np.asarray(buckets.tokens) / counts, np.asarray(buckets.pairs) / counts
        slope, base = c1 * pairs + c3 * mean + c5, c2 * pairs + c4 * mean + c6
        return BucketCosts(slope, base, np.where(size > 0, self.most_tokens / mean, 0.0))
