"""Lower bounds of the number of microbatches, and packers that approach them.

Problem: min number of bins of `room` tokens for samples of given lengths. Any packing needs at least

  L1  ⌈Σ lengths / room⌉,
  L2  for every threshold k ≤ room/2 (Martello and Toth): samples above room − k sit alone, those in (room/2, room − k]
      sit apart, and those in [k, room/2] need ⌈tokens that do not fit beside these / room⌉ more,
  U_k Σ u_k(length), where u_k is dual feasible (Fekete and Schepers): a set that fits in a bin sums to at most 1.

O(n log n + n · NUM_DUALS); tests prove each at most the true optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.plan.types import Segment

Lengths = npt.NDArray[np.int64]

NUM_DUALS = 12
"""Number of dual functions; more hardly differ from the length itself, which L1 counts."""


def fewest_bins(segments: Sequence[Segment], room: int) -> int:
    """The best of all bounds; at least 1 with at least one sample."""
    if not segments:
        return 0
    lengths = np.sort(np.array([s.length for s in segments], dtype=np.int64))
    by_tokens = -(-taken(segments) // room)
    return max(by_tokens, by_halves(lengths, room), by_duals(lengths, room))


def taken(segments: Iterable[Segment]) -> int:
    return sum(s.length for s in segments)


def by_halves(lengths: Lengths, room: int) -> int:
    """Bound L2: the largest over all thresholds k; `lengths` ascend."""
    small = lengths[2 * lengths <= room]
    thresholds = np.concatenate([[0], np.unique(small)])
    num, num_large = len(lengths), len(lengths) - len(small)
    sums = np.concatenate([[0], np.cumsum(lengths)])
    # Samples above room − k are alone, without a partner of at least k tokens; the other large ones leave room.
    first_alone = np.searchsorted(lengths, room - thresholds, side="right")
    first_small = np.searchsorted(lengths, thresholds, side="left")
    middle = np.maximum(first_alone - len(small), 0)
    free = middle * room - (sums[len(small) + middle] - sums[len(small)])
    rest = sums[len(small)] - sums[np.minimum(first_small, len(small))]
    more = -(-np.maximum(rest - free, 0) // room)
    return int((num_large + more).max()) if num else 0


def by_duals(lengths: Lengths, room: int) -> int:
    """U_k for k = 1 … NUM_DUALS, in integers: u_k(x) = x/room if (k+1)·x/room is whole, else ⌊(k+1)·x/room⌋/k."""
    best = 0
    for k in range(1, NUM_DUALS + 1):
        times = (k + 1) * lengths
        # Over the common denominator k · room.
        values = np.where(times % room == 0, k * lengths, times // room * room)
        best = max(best, -(-int(values.sum()) // (k * room)))
    return best


Bins = list[list[Segment]]


def _decreasing(segments: Sequence[Segment]) -> list[Segment]:
    return sorted(segments, key=lambda s: (-s.length, s.job, s.step, s.index))


def first_fit(segments: Sequence[Segment], room: int) -> Bins:
    return _fit(segments, room, lambda free: free[0])


def best_fit(segments: Sequence[Segment], room: int) -> Bins:
    """Best fit decreasing: every sample into the fullest bin that holds it."""
    return _fit(segments, room, min)


def _fit(segments: Sequence[Segment], room: int, choose: Callable[[list[tuple[int, int]]], tuple[int, int]]) -> Bins:
    bins: Bins = []
    left: list[int] = []
    for s in _decreasing(segments):
        fitting = [(free - s.length, b) for b, free in enumerate(left) if s.length <= free]
        if not fitting:
            fitting = [(room - s.length, len(bins))]
            bins.append([])
            left.append(room)
        after, b = choose(fitting)
        bins[b].append(s)
        left[b] = after
    return bins


def next_fit(segments: Sequence[Segment], room: int) -> Bins:
    """Bins in the given order, a new one whenever a sample does not fit."""
    bins: Bins = [[]]
    for s in segments:
        if taken([*bins[-1], s]) > room:
            bins.append([])
        bins[-1].append(s)
    return bins


def filled(segments: Sequence[Segment], room: int) -> Bins:
    """Bin after bin: the longest sample left, and the subset of the others that fills it best."""
    left = _decreasing(segments)
    bins: Bins = []
    while left:
        longest = left[0]
        chosen = subset([s.length for s in left[1:]], room - longest.length)
        inside = {0, *(i + 1 for i in chosen)}
        bins.append([s for i, s in enumerate(left) if i in inside])
        left = [s for i, s in enumerate(left) if i not in inside]
    return bins


def subset(lengths: list[int], target: int) -> list[int]:
    """Indices of the lengths with the largest sum up to the target."""
    mask = (1 << (target + 1)) - 1
    reached = [1]
    for n in lengths:
        reached.append((reached[-1] | reached[-1] << n) & mask)
    total = reached[-1].bit_length() - 1
    chosen = []
    for i in range(len(lengths) - 1, -1, -1):
        if not reached[i] >> total & 1:
            chosen.append(i)
            total -= lengths[i]
    return chosen


def fewest(segments: Sequence[Segment], room: int, bound: int) -> Bins:
    """The best of all heuristics, cheapest first; stops at the first that meets the bound."""
    best = best_fit(segments, room)
    for attempt in (first_fit, filled):
        if len(best) <= bound:
            break
        bins = attempt(segments, room)
        best = bins if len(bins) < len(best) else best
    return best


def min_bins(
    segments: Sequence[Segment], room: int, max_bins: int, time_limit_s: float, *, keep_order: bool = False
) -> Bins | None:
    """Stage 1: fewest bins; None if so few cannot hold the samples, or none were found in time. `keep_order`: no sample
    of a job is in a bin before that of the one it follows."""
    return _solve(segments, room, max_bins, time_limit_s, is_count=True, keep_order=keep_order)


def min_smallest(
    segments: Sequence[Segment], room: int, num_bins: int, time_limit_s: float, *, keep_order: bool = False
) -> Bins | None:
    """Stage 2: at most `num_bins` bins, the last as empty as possible."""
    return _solve(segments, room, num_bins, time_limit_s, is_count=False, keep_order=keep_order)


def _solve(
    segments: Sequence[Segment], room: int, num_bins: int, limit_s: float, *, is_count: bool, keep_order: bool
) -> Bins | None:
    from scipy.optimize import Bounds, milp

    n = len(segments)
    num_x = n * num_bins
    objective, lower = np.zeros(num_x + num_bins), np.zeros(num_x + num_bins)
    if is_count:
        objective[num_x:] = 1
    else:
        objective[num_bins - 1 : num_x : num_bins] = [s.length for s in segments]
        lower[num_x:] = 1
    result = milp(
        objective,
        integrality=np.ones(len(lower)),
        bounds=Bounds(lower, np.ones(len(lower))),
        constraints=_constraints(segments, room, num_bins, keep_order=keep_order),
        options={"time_limit": max(limit_s, 0.01)},
    )
    if result.x is None:
        return None
    x = np.round(result.x[:num_x]).reshape(n, num_bins).argmax(axis=1)
    bins = [[s for s, b in zip(segments, x.tolist(), strict=True) if b == k] for k in range(num_bins)]
    return [own for own in bins if own]


def _constraints(segments: Sequence[Segment], room: int, num_bins: int, *, keep_order: bool) -> Any:
    """Constraints over the columns x (sample-major) and z; segments of a job are in its order."""
    from scipy.optimize import LinearConstraint
    from scipy.sparse import coo_array

    n = len(segments)
    num_x = n * num_bins
    job = np.array([s.job for s in segments])
    lengths = np.array([s.length for s in segments])
    sample, bin_of_x = np.divmod(np.arange(num_x), num_bins)
    bins, pairs = np.arange(num_bins), np.arange(num_bins - 1)
    room_row, order_row = n, n + num_bins
    parts = [  # row, column, value
        (sample, np.arange(num_x), np.ones(num_x)),
        (room_row + bin_of_x, np.arange(num_x), lengths[sample]),
        (room_row + bins, num_x + bins, np.full(num_bins, -room)),
        (order_row + pairs, num_x + pairs + 1, np.ones(num_bins - 1)),
        (order_row + pairs, num_x + pairs, -np.ones(num_bins - 1)),
    ]
    num_rows = order_row + num_bins - 1
    if keep_order:
        # In the first bins together, no more of a sample than of the one before it.
        before = np.flatnonzero(job[1:] == job[:-1])[:, None]
        up_to, b = np.nonzero(np.tri(num_bins - 1))
        row = num_rows + np.arange(len(before))[:, None] * (num_bins - 1) + up_to
        for s, sign in ((before + 1, 1.0), (before, -1.0)):
            parts.append((row.ravel(), (s * num_bins + b).ravel(), np.full(row.size, sign)))
        num_rows += len(before) * (num_bins - 1)
    rows, columns, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    matrix = coo_array((values, (rows, columns)), shape=(num_rows, num_x + num_bins)).tocsr()
    lower = np.where(np.arange(num_rows) < n, 1.0, -np.inf)
    return LinearConstraint(matrix, lower, np.where(np.arange(num_rows) < n, 1.0, 0.0))
