"""Lower bounds of the number of microbatches, which no packing can beat; one that reaches them needs no solver.

Problem: min number of bins of `room` tokens for samples of given lengths. Any packing needs at least

  L1  ⌈Σ_j padded(tokens of job j) / room⌉,
  L2  for every threshold k ≤ room/2 (Martello and Toth): samples above room − k sit alone, those in (room/2, room − k]
      sit apart, and those in [k, room/2] need ⌈tokens that do not fit beside these / room⌉ more,
  U_k Σ u_k(length), where u_k is dual feasible (Fekete and Schepers): a set that fits in a bin sums to at most 1.

L2 and U_k use unpadded lengths, a relaxation. O(n log n + n · NUM_DUALS); tests prove each at most the true optimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from weft.plan.pack.types import RoundLimits
from weft.plan.types import Segment

Lengths = npt.NDArray[np.int64]

NUM_DUALS = 12
"""Beyond this u_k hardly differs from the length itself, which L1 counts."""


def fewest_bins(segments: Sequence[Segment], limits: RoundLimits) -> int:
    """The best of all bounds; at least 1 for at least one sample."""
    if not segments:
        return 0
    lengths = np.sort(np.array([s.length for s in segments], dtype=np.int64))
    return max(by_tokens(segments, limits), by_halves(lengths, limits.room), by_duals(lengths, limits.room))


def by_tokens(segments: Iterable[Segment], limits: RoundLimits) -> int:
    """L1: every job padded only once."""
    tokens: dict[str, int] = {}
    for s in segments:
        tokens[s.job] = tokens.get(s.job, 0) + s.length
    return -(-sum(map(limits.padded, tokens.values())) // limits.room)


def by_halves(lengths: Lengths, room: int) -> int:
    """L2 over every threshold; `lengths` ascending."""
    small = lengths[2 * lengths <= room]
    thresholds = np.concatenate([[0], np.unique(small)])
    num, num_large = len(lengths), len(lengths) - len(small)
    sums = np.concatenate([[0], np.cumsum(lengths)])
    # Samples above room − k sit alone and take no partner of at least k tokens; the other large ones leave room.
    first_alone = np.searchsorted(lengths, room - thresholds, side="right")
    first_small = np.searchsorted(lengths, thresholds, side="left")
    middle = np.maximum(first_alone - len(small), 0)
    free = middle * room - (sums[len(small) + middle] - sums[len(small)])
    rest = sums[len(small)] - sums[np.minimum(first_small, len(small))]
    more = -(-np.maximum(rest - free, 0) // room)
    return int((num_large + more).max()) if num else 0


def by_duals(lengths: Lengths, room: int) -> int:
    """U_k for k = 1 … NUM_DUALS, in whole numbers: u_k(x) = x/room if (k+1)·x/room is whole, else ⌊(k+1)·x/room⌋/k."""
    best = 0
    for k in range(1, NUM_DUALS + 1):
        times = (k + 1) * lengths
        # Over the common denominator k · room.
        values = np.where(times % room == 0, k * lengths, times // room * room)
        best = max(best, -(-int(values.sum()) // (k * room)))
    return best
