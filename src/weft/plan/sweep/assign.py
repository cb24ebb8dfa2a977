"""Which group of GPUs trains which configurations.

Groups ("lanes") work through their packs in turn. Longest first, every configuration goes to the lane that would be
done first (LPT); then configurations move, or change places, between the lane that ends last and the others while that
ends sooner. Time of a lane is exact for its split into packs; the number of tries is bounded, so the answer does not
depend on the machine's speed.

The configurations of one group of GPUs, cut into packs that follow one another.

    min Σ T(pack)   over cuts of an ordered list into runs, each within memory

by dynamic programming over the list's ends: O(n · MAX_PACK) prices, exact for the order it is given. Two orders are
tried: by steps, so that those that end together train together, and by rank, so that small adapters can be many.
Results are kept by what is in the list, so lists that differ in names alone are split once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.plan.sweep.cost import Floats, PackCost

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


MAX_TRIES = 120
"""Changes tried for one assignment; about a millisecond each."""


@dataclass
class DeviceLane:
    """A group of GPUs and the kinds it trains from when it is free."""

    gpus: tuple[int, ...]
    ready_s: float = 0.0
    kinds: list[int] = field(default_factory=list)

    @property
    def degree(self) -> int:
        """Its GPUs."""
        return len(self.gpus)


class Assigner:
    """Fills lanes with kinds."""

    def __init__(self, cost: PackCost) -> None:
        self.cost = cost
        self.splitter = Splitter(cost)
        self._work = {degree: self._estimates(degree) for degree in cost.setting.degrees}

    def _estimates(self, degree: int) -> Floats:
        """Seconds of every kind in full microbatches; inf where it does not fit."""
        cost, ways = self.cost, self.cost.degree == degree
        line = cost.large[:, ways]
        work = cost.own[:, ways] + cost.rows[:, None] * (line[1] + line[0] / cost.filled[ways])
        fits = cost.adapter[:, ways] <= cost.room[cost.width][:, ways]
        return np.asarray(np.where(fits, work, np.inf).min(axis=1))

    def work_s(self, kind: int, degree: int) -> float:
        """An estimate of what a kind adds to a lane; inf where it does not fit."""
        return float(self._work[degree][kind])

    def split(self, lane: DeviceLane) -> Split:
        """The lane's packs."""
        return self.splitter.split(lane.kinds, lane.degree) if lane.kinds else Split(0.0)

    def end_s(self, lane: DeviceLane) -> float:
        """When a lane is done."""
        return lane.ready_s + self.split(lane).seconds

    def fill(self, lanes: Sequence[DeviceLane], kinds: Sequence[int]) -> bool:
        """Deals kinds to lanes; False if one fits on none."""
        loads = [lane.ready_s for lane in lanes]
        widest = max(lane.degree for lane in lanes)
        for kind in sorted(kinds, key=lambda k: (-self.work_s(k, widest), k)):
            ends = [load + self.work_s(kind, lane.degree) for load, lane in zip(loads, lanes, strict=True)]
            place = int(np.argmin(ends))
            if not np.isfinite(ends[place]):
                return False
            lanes[place].kinds.append(kind)
            loads[place] = ends[place]
        return True

    def improve(self, lanes: Sequence[DeviceLane]) -> None:
        """Moves kinds between lanes while the last of them then ends sooner."""
        tries_left = MAX_TRIES
        while tries_left > 0:
            last = max(lanes, key=self.end_s)
            others = sorted((lane for lane in lanes if lane is not last), key=self.end_s)
            changes = ((lane, *change) for lane in others for change in self._changes(last, lane))
            for lane, mine, theirs in itertools.islice(changes, tries_left):
                tries_left -= 1
                if self._accept(last, lane, mine, theirs):
                    break
            else:
                return

    def _accept(self, last: DeviceLane, lane: DeviceLane, mine: list[int], theirs: list[int]) -> bool:
        """Makes a change if the later of both lanes then ends sooner."""
        limit = self.end_s(last) * (1 - 1e-9)
        if last.ready_s + self._seconds(mine, last.degree) >= limit:
            return False
        if lane.ready_s + self._seconds(theirs, lane.degree) >= limit:
            return False
        last.kinds, lane.kinds = mine, theirs
        return True

    def _seconds(self, kinds: list[int], degree: int) -> float:
        return self.splitter.split(kinds, degree).seconds if kinds else 0.0

    def _changes(self, last: DeviceLane, lane: DeviceLane) -> Iterator[tuple[list[int], list[int]]]:
        """Both lanes' kinds after one goes over, or after one goes over for a smaller one."""
        for kind in sorted(set(last.kinds), key=lambda k: (self.work_s(k, last.degree), k)):
            rest = _without(last.kinds, kind)
            yield rest, [*lane.kinds, kind]
            for other in sorted(set(lane.kinds)):
                if self.work_s(other, last.degree) < self.work_s(kind, last.degree):
                    yield [*rest, other], [*_without(lane.kinds, other), kind]


def _without(kinds: Sequence[int], kind: int) -> list[int]:
    rest = list(kinds)
    rest.remove(kind)
    return rest
