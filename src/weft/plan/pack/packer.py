"""Packs one round: the number of slots, and the slot of every sample.

Problem: min largest + (m − 1) · second largest, over the number of slots m, subject to the capacity after padding and
the jobs' windows. Numbers of slots come in the order of their lower bounds; the first filling that those left cannot
beat by more than the tolerance is taken. Where nothing fits the fewest slots, other packers, and within the budget an
exact solver, are asked whether so few are possible at all: if not, one more is proven to be the fewest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.plan.cost.types import CostModel
from weft.plan.pack import bins, milp
from weft.plan.pack.balance import Items, Real, Whole, balance
from weft.plan.pack.ordered import fill_in_order
from weft.plan.pack.types import TOLERANCE, PackedRound, RoundLimits
from weft.plan.types import Microbatch, Segment

_SOLVE_S = 1.0
"""Most that a single round may take of the budget; HiGHS proves within this, or hardly ever."""
_ROOMS_MEASURED = 16
"""Full microbatches over which a sample's part is taken where whole tiles are computed, so that empty rows hardly
count in it."""
_UNEVEN_SHARE = 0.3
"""How much of what a slot has above the mean the stages wait for, where slots are filled by tiles: of 0.3 and 1 tried
on four unlike jobs, the better."""


@dataclass
class PackingWork:
    """Seconds on one stage, forward and backward, as a sum over samples and a fixed part.

    Exact for cost models of that form. Others, which read weights however few the tokens, count by the line from a
    microbatch with one sample to a full one; what is called a bound is then as good as the line. Where whole tiles are
    computed, the line is that of full tiles: rows that stay empty count where a slot's samples are known.
    """

    cost: CostModel
    num_stages: int
    room: int
    row_tile: int = 1
    known: dict[int, float] = field(default_factory=dict)

    def of(self, lengths: Sequence[int]) -> float:
        """A microbatch of these samples, on an average stage."""
        stages = range(self.num_stages)
        total = sum(self.cost.forward_s(lengths, s) + self.cost.backward_s(lengths, s) for s in stages)
        return total / self.num_stages

    @property
    def fixed(self) -> float:
        """A microbatch, however small."""
        if 0 not in self.known:
            self.known[0] = max(self.of([self.row_tile]) - self.sample(self.row_tile), 0.0)
        return self.known[0]

    def sample(self, length: int) -> float:
        """What a sample of some tokens adds."""
        if length not in self.known:
            tokens = self.room if self.row_tile == 1 else _ROOMS_MEASURED * self.room
            count = max(2, tokens // length)
            self.known[length] = (self.of([length] * count) - self.of([length])) / (count - 1)
        return self.known[length]


@dataclass(frozen=True)
class RoundTask:
    """A round to pack."""

    segments: tuple[Segment, ...]
    fewest_bins: int
    """Lower bound of the number of microbatches, from the samples alone."""
    places: Mapping[str, tuple[int, int]]
    """Each job's places before and after the round (`layout.py`)."""
    bounds_s: Mapping[int, float]
    """Lower bound of the round's time, by number of slots; infinite where there is no room."""


@dataclass
class Packer:
    """Packs rounds, and remembers those it has seen: the same lengths in the same places are packed once."""

    limits: RoundLimits
    work: PackingWork
    keep_order: bool
    solved: dict[tuple[object, ...], tuple[list[int], int, int]] = field(default_factory=dict)
    """Slot of every sample, number of slots, and lower bound of the number of microbatches."""

    def run(self, tasks: Sequence[RoundTask], start: int, budget_s: float) -> list[PackedRound]:
        """Packs rounds, one after another; once the budget is spent no solver is asked any more."""
        until = time.perf_counter() + budget_s
        rounds = []
        for index, task in enumerate(tasks, start):
            key = (*((s.job, s.length) for s in task.segments), *sorted(task.places.items()))
            if key not in self.solved:
                self.solved[key] = self.solve(task, until - time.perf_counter())
            rounds.append(self.packed(index, task.segments, *self.solved[key]))
        return rounds

    def packed(
        self, index: int, segments: Sequence[Segment], slot: Sequence[int], num_slots: int, fewest: int
    ) -> PackedRound:
        """The round as data, with its bounds."""
        inside: list[list[Segment]] = [[] for _ in range(num_slots)]
        for s, q in zip(segments, slot, strict=True):
            inside[q].append(s)
        slots = tuple(Microbatch(tuple(own)) for own in inside)
        largest = max(self.work.of([s.length for s in own]) for own in inside)
        work, fixed = [self.work.sample(s.length) for s in segments], self.work.fixed
        # Both grow with the number of slots, so the fewest give the bound.
        bound = max(sum(work) + fewest * fixed, fewest * (max(work) + fixed))
        return PackedRound(index, slots, fewest, num_slots * largest, bound)

    def solve(self, task: RoundTask, budget_s: float) -> tuple[list[int], int, int]:
        """Slot of every sample, number of slots, and lower bound of the number of microbatches."""
        segments, limits = task.segments, self.limits
        # A pipeline with fewer microbatches under way than stages idles; that many are no waste.
        fewest = max(task.fewest_bins, min(limits.num_stages, len(segments)))
        slot, num_slots = self.even(task) or self.without_windows(segments)
        # Without windows there may be fewer still: no-ops fill the pipeline then.
        fewest = min(fewest, len(set(slot)))
        if len(set(slot)) <= fewest or fewest > task.fewest_bins:
            return slot, num_slots, fewest
        found = bins.fewest(segments, limits, fewest)
        if len(found) > fewest and budget_s > 0:
            solved = milp.min_bins(segments, limits, fewest, min(budget_s, _SOLVE_S))
            if solved.bound > fewest + 0.5:
                return slot, num_slots, fewest + 1
            found = solved.bins or found
        # Bins without windows need no-ops between rounds, which cost more than a microbatch; one stage needs none.
        if limits.free_distance == 1 and not self.keep_order and len(found) < len(set(slot)):
            place = {s: b for b, own in enumerate(found) for s in own}
            return [place[s] for s in segments], len(found), fewest
        return slot, num_slots, fewest

    def even(self, task: RoundTask) -> tuple[list[int], int] | None:
        """The best even filling and its number of slots; None if none was made to fit."""
        distance, fixed = self.limits.free_distance, self.work.fixed
        number = {j: i for i, j in enumerate(sorted({s.job for s in task.segments}))}
        job = np.array([number[s.job] for s in task.segments], dtype=np.int64)
        first = np.array([task.places[j][0] for j in number], dtype=np.int64)[job]
        after = np.array([task.places[j][1] for j in number], dtype=np.int64)[job]
        lengths = np.array([s.length for s in task.segments], dtype=np.int64)
        work = np.array([self.work.sample(s.length) for s in task.segments])
        best: tuple[float, list[int], int] | None = None
        for bound, m in sorted((bound, m) for m, bound in task.bounds_s.items()):
            level = bound / m - fixed
            # One sample above the others' level delays the stages once, not in every slot.
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
        """What a round takes beyond the fixed part of its slots: as if all were as long as the second longest.

        Filled by tiles, slots are uneven on purpose; stages that run ahead absorb most of that.
        """
        loads: Real = np.bincount(slot, weights=work, minlength=num_slots).astype(np.float64)
        tile = self.limits.row_tile
        if tile == 1:
            *_, second, largest = [0.0, *np.sort(loads)]
            return float(largest + (num_slots - 1) * (second if num_slots > 1 else largest))
        tokens = np.bincount(slot, weights=lengths, minlength=num_slots)
        loads = loads + (-tokens % tile) * self.work.sample(tile) / tile
        return float(loads.sum() + _UNEVEN_SHARE * num_slots * (loads.max() - loads.mean()))

    def fill(self, items: Items, num_slots: int, level: float) -> Whole | None:
        """An even filling of so many slots; no slot can be brought below the level."""
        limits = self.limits
        if self.keep_order:
            return fill_in_order(items, num_slots, limits)
        return balance(items, num_slots, limits.room, limits.padding_multiple, level)

    def without_windows(self, segments: Sequence[Segment]) -> tuple[list[int], int]:
        """Where windows leave too little room: any bins; no-ops will keep the distance."""
        found = bins.next_fit(segments, self.limits) if self.keep_order else bins.fewest(segments, self.limits, 1)
        place = {s: b for b, own in enumerate(found) for s in own}
        return [place[s] for s in segments], len(found)
