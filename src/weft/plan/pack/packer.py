"""Packs one round: the number of slots, and the slot of every sample.

Problem: min largest + (m − 1) · second largest, over the number of slots m, subject to the capacity and the
jobs' windows. Numbers of slots come in the order of their lower bounds; the first filling that the rest cannot beat
by more than the tolerance is taken. If no filling of a single stage has the fewest slots, other packers try to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.plan.cost.types import CostModel
from weft.plan.pack import bins
from weft.plan.pack.balance import Items, Real, Whole, balance
from weft.plan.pack.types import TOLERANCE, PackedRound, RoundLimits
from weft.plan.types import Microbatch, Segment

_ROOMS_MEASURED = 16
"""Full microbatches over which a sample's share is taken with whole tiles, so that empty rows hardly count."""
_UNEVEN_SHARE = 0.3
"""Weight of a slot's excess above the mean where slots are filled by tiles: better than 1 on four unlike jobs."""


@dataclass
class PackingWork:
    """Seconds on one stage, forward and backward, as a sum over samples and a fixed part.

    Exact for cost models of that form. Others, which read weights for any number of tokens, are approximated by the
    line from a microbatch with one sample to a full one; bounds are then as good as the line. With whole tiles, the
    line is that of full tiles: empty rows count once a slot's samples are known.
    """

    cost: CostModel
    num_stages: int
    room: int
    row_tile: int = 1
    known: dict[int, float] = field(default_factory=dict)

    def of(self, lengths: Sequence[int]) -> float:
        stages = range(self.num_stages)
        total = sum(self.cost.forward_s(lengths, s) + self.cost.backward_s(lengths, s) for s in stages)
        return total / self.num_stages

    @property
    def fixed(self) -> float:
        if 0 not in self.known:
            self.known[0] = max(self.of([self.row_tile]) - self.sample(self.row_tile), 0.0)
        return self.known[0]

    def sample(self, length: int) -> float:
        if length not in self.known:
            tokens = self.room if self.row_tile == 1 else _ROOMS_MEASURED * self.room
            count = max(2, tokens // length)
            self.known[length] = (self.of([length] * count) - self.of([length])) / (count - 1)
        return self.known[length]


@dataclass(frozen=True)
class RoundTask:
    segments: tuple[Segment, ...]
    fewest_bins: int
    """Lower bound of the number of microbatches, from the samples alone."""
    windows: Mapping[str, tuple[int, int]]
    """Each job's first slots after the previous round and last ones before the next (`rounds.py`)."""
    bounds_s: Mapping[int, float]
    """Lower bound of the round's seconds, by number of slots; infinite where they do not fit."""


@dataclass
class Packer:
    """Packs rounds, with a cache: the same lengths in the same windows are packed once."""

    limits: RoundLimits
    work: PackingWork
    keep_order: bool
    solved: dict[tuple[object, ...], tuple[list[int], int, int]] = field(default_factory=dict)
    """Slot of every sample, number of slots, and lower bound of the number of microbatches."""

    def run(self, tasks: Sequence[RoundTask]) -> list[PackedRound]:
        """Packs rounds in order."""
        rounds = []
        for index, task in enumerate(tasks):
            key = (*((s.job, s.length) for s in task.segments), *sorted(task.windows.items()))
            if key not in self.solved:
                self.solved[key] = self.solve(task)
            rounds.append(self.packed(index, task.segments, *self.solved[key]))
        return rounds

    def packed(
        self, index: int, segments: Sequence[Segment], slot: Sequence[int], num_slots: int, fewest: int
    ) -> PackedRound:
        inside: list[list[Segment]] = [[] for _ in range(num_slots)]
        for s, q in zip(segments, slot, strict=True):
            inside[q].append(s)
        slots = tuple(Microbatch(tuple(own)) for own in inside)
        largest = max(self.work.of([s.length for s in own]) for own in inside)
        work, fixed = [self.work.sample(s.length) for s in segments], self.work.fixed
        # Both grow with the number of slots, so the fewest give the bound.
        bound = max(sum(work) + fewest * fixed, fewest * (max(work) + fixed))
        return PackedRound(index, slots, fewest, num_slots * largest, bound)

    def solve(self, task: RoundTask) -> tuple[list[int], int, int]:
        """Slot of every sample, number of slots, and lower bound of the number of microbatches."""
        segments, limits = task.segments, self.limits
        # A pipeline with fewer microbatches in flight than stages idles, so that many are no waste.
        fewest = max(task.fewest_bins, min(limits.num_stages, len(segments)))
        slot, num_slots = self.even(task) or self.without_windows(segments)
        # Without windows there may be fewer still; empty microbatches fill the pipeline then.
        fewest = min(fewest, len(set(slot)))
        # Bins without windows need empty microbatches between rounds, which cost more; one stage needs none.
        if limits.free_distance == 1 and not self.keep_order and len(set(slot)) > fewest:
            found = bins.fewest(segments, limits.capacity, fewest)
            if len(found) < len(set(slot)):
                slot, num_slots = _slots_of(found, segments)
        return slot, num_slots, fewest

    def even(self, task: RoundTask) -> tuple[list[int], int] | None:
        """The best even filling and its number of slots; None if none fits."""
        distance, fixed = self.limits.free_distance, self.work.fixed
        number = {j: i for i, j in enumerate(sorted({s.job for s in task.segments}))}
        job = np.array([number[s.job] for s in task.segments], dtype=np.int64)
        first = np.array([task.windows[j][0] for j in number], dtype=np.int64)[job]
        after = np.array([task.windows[j][1] for j in number], dtype=np.int64)[job]
        lengths = np.array([s.length for s in task.segments], dtype=np.int64)
        work = np.array([self.work.sample(s.length) for s in task.segments])
        best: tuple[float, list[int], int] | None = None
        for bound, m in sorted((bound, m) for m, bound in task.bounds_s.items()):
            level = bound / m - fixed
            # One sample above the level of the others delays the stages once, not in every slot.
            least = bound + max(0.0, float(work.max()) - level)
            if not np.isfinite(bound) or (best is not None and best[0] <= least * (1 + TOLERANCE)):
                break
            slot = self.fill(Items(lengths, work, job, first, m - distance + after), m, level)
            if slot is None:
                continue
            took = self._slots_s(slot, lengths, work, m) + m * fixed
            if best is None or took < best[0]:
                best = took, slot.tolist(), m
        return best and best[1:]

    def _slots_s(self, slot: Whole, lengths: Whole, work: Real, num_slots: int) -> float:
        """Seconds of a round beyond the fixed part of its slots: as if all were as long as the second longest. Slots
        filled by tiles are uneven on purpose; stages that run ahead absorb most of that."""
        loads: Real = np.bincount(slot, weights=work, minlength=num_slots).astype(np.float64)
        tile = self.limits.row_tile
        if tile == 1:
            *_, second, largest = [0.0, *np.sort(loads)]
            return float(largest + (num_slots - 1) * (second if num_slots > 1 else largest))
        tokens = np.bincount(slot, weights=lengths, minlength=num_slots)
        loads = loads + (-tokens % tile) * self.work.sample(tile) / tile
        return float(loads.sum() + _UNEVEN_SHARE * num_slots * (loads.max() - loads.mean()))

    def fill(self, items: Items, num_slots: int, level: float) -> Whole | None:
        """An even filling of `num_slots` slots; none can be brought below the level."""
        if self.keep_order:
            return fill_in_order(items, num_slots, self.limits)
        return balance(items, num_slots, self.limits.capacity, level)

    def without_windows(self, segments: Sequence[Segment]) -> tuple[list[int], int]:
        """A packing without windows, where they leave too little room; empty microbatches keep the distance."""
        room = self.limits.capacity
        found = bins.next_fit(segments, room) if self.keep_order else bins.fewest(segments, room, 1)
        return _slots_of(found, segments)


def _slots_of(found: bins.Bins, segments: Sequence[Segment]) -> tuple[list[int], int]:
    bin_of = {s: b for b, own in enumerate(found) for s in own}
    return [bin_of[s] for s in segments], len(found)


MAX_COMBINATIONS = 4096
"""Combinations tried for one slot; with four jobs seven or eight cut points of each."""
SAFE_FILL = 0.97
"""Share of a slot that the remaining samples may need on average: samples cannot be cut to fill one exactly."""
OVERFULL = 4.0
"""Cost of needing more than that, in empty rows per token."""


def fill_in_order(items: Items, num_slots: int, limits: RoundLimits) -> Whole | None:
    """The slot of every sample, with each job in order; None if it does not fit."""
    room = limits.capacity
    jobs = [np.flatnonzero(items.job == j) for j in range(int(items.job.max()) + 1)]
    first = [int(items.first[own[0]]) for own in jobs]
    last = [int(items.last[own[0]]) for own in jobs]
    work = [np.concatenate([[0.0], np.cumsum(items.work[own])]) for own in jobs]
    tokens = [np.concatenate([[0], np.cumsum(items.lengths[own])]) for own in jobs]
    done = [0] * len(jobs)
    slot = np.full(len(items.work), -1, dtype=np.int64)
    token_s = float(items.work.sum() / items.lengths.sum())
    for q in range(num_slots):
        left = np.array([w[-1] - w[d] for w, d in zip(work, done, strict=True)])
        level = float(_levels(left[None, :], last, q, num_slots)[0])
        here = [j for j in range(len(jobs)) if first[j] <= q <= last[j] and done[j] < len(jobs[j])]
        if not here:
            continue
        cuts = _cut_points(here, done, work, last, q, level)
        grid = np.stack([c.ravel() for c in np.meshgrid(*cuts, indexing="ij")], axis=1)
        given = np.stack([work[j][grid[:, i]] - work[j][done[j]] for i, j in enumerate(here)], axis=1)
        taken: Whole = np.sum([tokens[j][grid[:, i]] - tokens[j][done[j]] for i, j in enumerate(here)], axis=0)
        after = np.repeat(left[None, :], len(grid), axis=0)
        after[:, here] -= given
        load = given.sum(axis=1)
        needed = _levels(after, last, q + 1, num_slots)
        score = (
            np.maximum(load, needed)
            if limits.row_tile == 1
            else token_s * _empty_rows(taken, min(room, level / token_s), needed / token_s - SAFE_FILL * room, limits)
        )
        # Among equals the one nearest to the level.
        score = np.where(taken <= room, score + 1e-6 * np.abs(load - level), np.inf)
        best = int(score.argmin())
        if score[best] == np.inf:
            return None
        for i, j in enumerate(here):
            slot[jobs[j][done[j] : grid[best, i]]] = q
            done[j] = int(grid[best, i])
    return slot if (slot >= 0).all() else None


def _empty_rows(tokens: Whole, level: float, beyond: Real, limits: RoundLimits) -> Real:
    """The cost of choices in rows: empty ones, those away from the level's tiles, and tokens beyond the room."""
    rows = -(-tokens // limits.row_tile) * limits.row_tile
    usual = np.ceil(level / limits.row_tile) * limits.row_tile
    cost: Real = (rows - tokens) + limits.unlike * np.abs(rows - usual) + OVERFULL * np.maximum(beyond, 0.0)
    return cost


def _levels(left: Real, last: list[int], q: int, num_slots: int) -> Real:
    """Least work of the fullest slot from q on, for each row of remaining work by job."""
    level = np.zeros(len(left))
    for e in sorted({*last, num_slots - 1}):
        due = [j for j, end in enumerate(last) if end <= e]
        level = np.maximum(level, left[:, due].sum(axis=1) / (e - q + 1) if e >= q else 0.0)
    return level


def _cut_points(
    here: list[int], done: list[int], work: list[Real], last: list[int], q: int, level: float
) -> list[Whole]:
    """Numbers of samples to try, by job, around those that fill the slot by earliest deadline."""
    free = level
    middle: dict[int, int] = {}
    for j in sorted(here, key=lambda j: (last[j], j)):
        reach = np.searchsorted(work[j], work[j][done[j]] + free, side="right") - 1
        middle[j] = max(int(reach), done[j])
        free -= work[j][middle[j]] - work[j][done[j]]
    spread = 0
    cuts: list[Whole] = []
    while True:
        wider = []
        for j in here:
            end = len(work[j]) - 1
            if last[j] == q:
                wider.append(np.array([end]))
            else:
                wider.append(np.arange(max(done[j], middle[j] - spread), min(end, middle[j] + spread) + 1))
        is_same = bool(cuts) and all(len(a) == len(b) for a, b in zip(cuts, wider, strict=True))
        if cuts and (is_same or np.prod([len(c) for c in wider]) > MAX_COMBINATIONS):
            return cuts
        cuts, spread = wider, spread + 1
