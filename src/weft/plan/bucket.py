"""Which lengths samples are padded to: bucket bounds with the least padding, by dynamic programming.

Bounds are multiples of `grain`. Of the U intervals between multiples that hold a sample, with upper bounds u and n
samples each, the first i fall into at most j buckets with the fewest padded tokens

    F(i, j) = min over i' < i of  F(i', j − 1) + u_i · (samples of the intervals i' + 1 … i),      F(0, j) = 0

which is LobRA's equation 4 with the tokens themselves counted too: they are the same for all bounds. O(B + R·U²) for B
samples and R buckets, as matrix operations. Tests compare it with brute force. Among equals the lowest bounds win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft.errors import PlanError

NUM_BUCKETS = 16
"""LobRA's choice: with more, padding hardly shrinks."""
GRAIN = 64


@dataclass(frozen=True)
class Buckets:
    """Samples sorted into ranges of length."""

    bounds: tuple[int, ...]
    """What each bucket's samples are padded to, rising."""
    counts: tuple[float, ...]
    """Samples of each bucket."""
    tokens: tuple[float, ...]
    """Σ length of each bucket's samples."""
    pairs: tuple[float, ...]
    """Σ length² of each bucket's samples."""
    at_home: tuple[tuple[int, ...], ...] = ()
    """Of these samples those of each job that has one replica as its home, by bucket."""

    @property
    def padding(self) -> float:
        """Tokens added to the samples."""
        return sum(self.padded_tokens) - sum(self.tokens)

    @property
    def padded_tokens(self) -> tuple[float, ...]:
        """Tokens of each bucket with what was added."""
        return tuple(bound * count for bound, count in zip(self.bounds, self.counts, strict=True))

    def place_of(self, lengths: Sequence[int]) -> list[int]:
        """The bucket of each sample."""
        found: list[int] = np.searchsorted(self.bounds, lengths).tolist()
        return found

    def with_homes(self, jobs: Iterable[Sequence[int]]) -> Buckets:
        """The same samples, of which those with the lengths of each of these jobs stay together."""
        places = (np.bincount(self.place_of(lengths), minlength=len(self.bounds)) for lengths in jobs)
        return replace(self, at_home=tuple(tuple(own.tolist()) for own in places))


def choose_buckets(lengths: Sequence[int], num_buckets: int = NUM_BUCKETS, grain: int = GRAIN) -> Buckets:
    """At most so many buckets with the least padding."""
    _check(lengths, num_buckets, grain)
    uppers_U, counts_U = np.unique(-(-np.asarray(lengths) // grain) * grain, return_counts=True)
    bounds = uppers_U[_last_intervals(uppers_U, counts_U, num_buckets)]
    return fixed_buckets(lengths, bounds.tolist())


def fixed_buckets(lengths: Sequence[int], bounds: Sequence[int]) -> Buckets:
    """The samples in buckets of given bounds; those that would be empty are left out."""
    if max(lengths) > max(bounds):
        raise PlanError(f"a sample has {max(lengths):,} tokens; the largest bound is {max(bounds):,}.", where="bounds")
    known = np.asarray(lengths, dtype=np.float64)
    place = np.searchsorted(np.sort(bounds), known)
    sums = [np.bincount(place, weights, minlength=len(bounds)) for weights in (None, known, known * known)]
    used = np.flatnonzero(sums[0])
    counts, tokens, pairs = (tuple(float(x) for x in found[used]) for found in sums)
    return Buckets(tuple(int(bound) for bound in np.sort(bounds)[used]), counts, tokens, pairs)


def _last_intervals(uppers_U: npt.NDArray[np.int64], counts_U: npt.NDArray[np.int64], num_buckets: int) -> list[int]:
    """The last interval of every bucket."""
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
