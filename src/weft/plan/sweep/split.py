"""The configurations of one group of GPUs, cut into packs that follow one another.

    min Σ T(pack)   over cuts of an ordered list into runs, each within memory

by dynamic programming over the list's ends: O(n · MAX_PACK) prices, exact for the order it is given. Two orders are
tried: by steps, so that those that end together train together, and by rank, so that small adapters can be many.
Results are kept by what is in the list, so lists that differ in names alone are split once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.sweep.cost import PackCost

MAX_PACK = 64
"""Most configurations of one pack; many more than fill a microbatch."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One pack: its kinds, its way, its time."""

    kinds: tuple[int, ...]
    way: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Split:
    """Packs in turn, the longest first; `seconds` is inf if something does not fit."""

    seconds: float
    cuts: tuple[Cut, ...] = ()


class Splitter:
    """Splits lists of kinds on groups of any degree; remembers what it has split."""

    def __init__(self, cost: PackCost) -> None:
        self.cost = cost
        self._known: dict[tuple[int, tuple[int, ...]], Split] = {}

    def split(self, kinds: Sequence[int], degree: int) -> Split:
        """The best packs for these kinds, in any order, on one group of so many GPUs."""
        key = degree, tuple(sorted(kinds))
        if key not in self._known:
            steps, ranks = self.cost.steps, [kind.rank for kind in self.cost.kinds]
            by_steps = sorted(kinds, key=lambda k: (-steps[k], -ranks[k], k))
            by_rank = sorted(kinds, key=lambda k: (-ranks[k], -steps[k], k))
            found = [self._cut(by_steps, degree)]
            if by_rank != by_steps:
                found.append(self._cut(by_rank, degree))
            self._known[key] = min(found, key=lambda split: split.seconds)
        return self._known[key]

    def _cut(self, order: Sequence[int], degree: int) -> Split:
        n = len(order)
        best = np.full(n + 1, np.inf)
        best[0] = 0.0
        came: list[tuple[int, int, float]] = [(0, 0, 0.0)] * (n + 1)
        for start in range(n):
            if not np.isfinite(best[start]):
                break
            end = min(n, start + MAX_PACK)
            seconds, ways = self.cost.prefixes(order[start:end], degree)
            for offset in np.flatnonzero(best[start] + seconds < best[start + 1 : end + 1]):
                place = start + int(offset) + 1
                best[place] = best[start] + seconds[offset]
                came[place] = start, int(ways[offset]), float(seconds[offset])
        if not np.isfinite(best[n]):
            return Split(float("inf"))
        cuts, place = [], n
        while place:
            start, way, seconds_s = came[place]
            cuts.append(Cut(tuple(order[start:place]), way, seconds_s))
            place = start
        return Split(float(best[n]), tuple(sorted(cuts, key=lambda cut: (-cut.seconds, cut.kinds))))
