"""Packs jobs' global batches, round by round, into even microbatches that leave no bubble.

Problem, for every round: min m · (largest microbatch), over the number of slots m and the slot of every sample, subject
to the capacity and to the bubble lemma between rounds (each job's window of slots). Lower bound of a
round's time on a stage: all samples' work plus the fixed cost of the fewest microbatches (`bins.py`, and one per
stage).

Method: numbers of slots in order of their bound; for each, even filling (`balance.py`, or `packer.fill_in_order` where
every job's order is kept); the first that fits and that the rest cannot beat is taken. O(samples · log). Rounds of the
same lengths are packed once.

Measured (Nov 2026, 2 cores): 25,600 samples of 4 jobs, 4 stages, about 3 s (`python -m benchmarks plan`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.cost.types import CostModel, LinearCost
from weft.plan.pack.balance import Mask, Real, Whole
from weft.plan.pack.bins import fewest_bins
from weft.plan.pack.packer import Packer, PackingWork, RoundTask
from weft.plan.pack.types import TOLERANCE, PackedRound, RoundLimits, RoundPlan, rounds_of
from weft.plan.types import JobQueue, Microbatch, Segment, with_empty_slots

_SPARE_SAMPLES = 8
"""Spare work of ranges of slots when windows are chosen, in typical samples: about one slot of nine."""


def pack_rounds(
    jobs: Sequence[JobQueue],
    limits: RoundLimits,
    *,
    cost: CostModel | None = None,
    keep_order: bool = False,
    behind: Sequence[Microbatch] = (),
) -> RoundPlan:
    """Even microbatches for every round, with their lower bounds; deterministic. `behind`: microbatches that run right
    before the first round; their jobs may have to wait."""
    samples = rounds_of(jobs)
    num_rounds = len(samples)
    work = PackingWork(cost or LinearCost(), limits.num_stages, limits.capacity, limits.row_tile)
    to_pack = _RoundsToPack.of(samples, limits, work)
    edges = choose_edges(to_pack.demand, to_pack.slots_after(behind), is_end=all(q.is_all for q in jobs))
    tasks = [to_pack.task(r, edges[r], edges[r + 1]) for r in range(num_rounds)]
    packer = Packer(limits, work, keep_order)
    packed = packer.run(tasks)
    _widen(to_pack, packer, packed, behind, edges[-1])
    stream = with_empty_slots((m for r in packed for m in r.slots), limits.lemma_distance)
    return RoundPlan(limits, tuple(packed), stream, keep_order)


@dataclass(frozen=True)
class _RoundsToPack:
    samples: Sequence[tuple[Segment, ...]]
    number: dict[str, int]
    fewest: list[int]
    demand: Demand

    @classmethod
    def of(cls, samples: Sequence[tuple[Segment, ...]], limits: RoundLimits, work: PackingWork) -> _RoundsToPack:
        jobs = sorted({s.job for segments in samples for s in segments})
        number = {j: i for i, j in enumerate(jobs)}
        work_RJ, tokens_RJ = np.zeros((len(samples), len(jobs))), np.zeros((len(samples), len(jobs)))
        for r, segments in enumerate(samples):
            for s in segments:
                work_RJ[r, number[s.job]] += work.sample(s.length)
                tokens_RJ[r, number[s.job]] += s.length
        fewest = [fewest_bins(segments, limits.capacity) for segments in samples]
        distance = limits.free_distance
        counts = [slot_counts(n, len(segments), distance) for n, segments in zip(fewest, samples, strict=True)]
        spare_R = _SPARE_SAMPLES * work_RJ.sum(axis=1) / np.array([len(segments) for segments in samples])
        return cls(
            samples,
            number,
            fewest,
            Demand(
                work_RJ=work_RJ,
                tokens_RJ=tokens_RJ,
                spare_R=spare_R,
                counts=counts,
                distance=distance,
                fixed=work.fixed,
                room=limits.capacity,
            ),
        )

    def task(self, r: int, before_J: Whole, after_J: Whole) -> RoundTask:
        times = round_s(self.demand, r, before_J[None, :], after_J[None, :])[0]
        bounds = dict(zip(self.demand.counts[r], times.tolist(), strict=True))
        windows = {j: (int(before_J[i]), int(after_J[i])) for j, i in self.number.items()}
        return RoundTask(self.samples[r], self.fewest[r], windows, bounds)

    def slots_after(self, slots: Sequence[Microbatch]) -> Whole:
        """First slots the jobs may use after these microbatches: recent jobs have to wait."""
        distance = self.demand.distance
        first_J = np.zeros(len(self.number), dtype=np.int64)
        tail = slots[max(0, len(slots) - distance + 1) :]
        for slot, microbatch in enumerate(tail, distance - len(tail)):
            for s in microbatch.segments:
                if s.job in self.number:
                    first_J[self.number[s.job]] = slot
        return first_J

    def slots_before(self, slots: Sequence[Microbatch]) -> Whole:
        """Last slots the jobs may use before these microbatches."""
        last_J = np.full(len(self.number), self.demand.distance - 1, dtype=np.int64)
        for slot, microbatch in reversed(list(enumerate(slots[: self.demand.distance - 1]))):
            for s in microbatch.segments:
                last_J[self.number[s.job]] = slot
        return last_J


def _widen(
    to_pack: _RoundsToPack, packer: Packer, packed: list[PackedRound], before: Sequence[Microbatch], end_J: Whole
) -> None:
    """Packs unproven rounds again, with the windows that their neighbours have left free."""
    for r, old in enumerate(packed):
        if old.is_fewest and old.gap <= TOLERANCE:
            continue
        before_J = to_pack.slots_after(packed[r - 1].slots if r else before)
        after_J = to_pack.slots_before(packed[r + 1].slots) if r + 1 < len(packed) else end_J
        task = to_pack.task(r, before_J, after_J)
        found = packer.even(task)
        if found is not None:
            new = packer.packed(old.index, task.segments, *found, old.fewest)
            packed[r] = min(old, new, key=lambda p: (p.gap > TOLERANCE, p.num_microbatches, p.gap))


MAX_TRIED = 1024
"""Combinations of edges up to which all are tried: five jobs on four stages."""
_SPARE_WEIGHT = 0.1
"""Weight of spare work: large enough to decide between equals, small enough not to add slots."""
_COMMON_ROUNDS = 64
"""Rounds looked at to choose the common edges; more change nothing."""


@dataclass(frozen=True)
class Demand:
    work_RJ: Real
    tokens_RJ: Real
    spare_R: Real
    """Spare work of ranges of slots in each round, since samples are not divisible."""
    counts: Sequence[range]
    distance: int
    fixed: float
    room: int


def slot_counts(fewest: int, num_samples: int, distance: int) -> range:
    """Numbers of slots worth trying for a round. Twice the distance more than needed leaves every slot to half of the
    jobs or more; further ones only cost."""
    low = max(fewest, distance)
    return range(low, max(low, min(low + 2 * distance, num_samples + distance - 1)) + 1)


def choose_edges(demand: Demand, start_J: Whole, *, is_end: bool) -> list[Whole]:
    """The jobs' edges at every boundary, from before the first round (given) to after the last. An edge is the first
    slot that a job may use after the boundary. With `is_end`, jobs may run up to the last slot."""
    distance, (num_rounds, num_jobs) = demand.distance, demand.work_RJ.shape
    if distance == 1:
        return [start_J] * (num_rounds + 1)
    common_J, all_KJ = _common_edges(demand)
    end_J = np.full(num_jobs, distance - 1, dtype=np.int64) if is_end else common_J
    edges = [start_J]
    for r in range(num_rounds - 1):
        time_K = _likely_s(demand, r, edges[-1][None, :], all_KJ)
        ahead_J = end_J if r + 2 == num_rounds else common_J
        time_K = time_K + _likely_s(demand, r + 1, all_KJ, ahead_J[None, :])
        edges.append(all_KJ[int(time_K.argmin())])
    return [*edges, end_J]


def round_s(demand: Demand, r: int, before_KJ: Whole, after_KJ: Whole) -> Real:
    """Lower bound of a round's time, by edges (rows; either may be a single one) and slots; inf: does not fit."""
    counts, distance = demand.counts[r], demand.distance
    work_KAB = _inside(demand.work_RJ[r], before_KJ, after_KJ, distance)
    tokens_KAB = _inside(demand.tokens_RJ[r], before_KJ, after_KJ, distance)
    return _times(demand, work_KAB, tokens_KAB, counts)


def _likely_s(demand: Demand, r: int, before_KJ: Whole, after_KJ: Whole) -> Real:
    """Expected time of a round with its best number of slots, by edges. Mostly its bound; spare work in ranges of slots
    distinguishes good edges from those that are barely possible."""
    distance = demand.distance
    # More slots are seldom best, and this is called often.
    counts = demand.counts[r][: distance + 1]
    work_KAB = _inside(demand.work_RJ[r], before_KJ, after_KJ, distance)
    tokens_KAB = _inside(demand.tokens_RJ[r], before_KJ, after_KJ, distance)
    is_part = (work_KAB > 0) & (work_KAB < demand.work_RJ[r].sum() * (1 - 1e-9))
    bound = _times(demand, work_KAB, tokens_KAB, counts).min(axis=1)
    spared = _times(demand, work_KAB + demand.spare_R[r] * is_part, tokens_KAB, counts).min(axis=1)
    times = bound + _SPARE_WEIGHT * spared
    # An infeasible round costs much, not everything: another boundary may help.
    worst = float(np.max(times, where=np.isfinite(times), initial=1.0))
    finite: Real = np.where(np.isfinite(times), times, 2 * worst)
    return finite


def _inside(amount_J: Real, before_KJ: Whole, after_KJ: Whole, distance: int) -> Real:
    """Amounts that must be between slot a and the last slots' b, by edges."""
    edges = np.arange(distance)
    starts_KAJ: Mask = before_KJ[:, None, :] >= edges[:, None]
    ends_KBJ: Mask = after_KJ[:, None, :] <= edges[:, None]
    inside_KAB: Real = (starts_KAJ * amount_J) @ ends_KBJ.transpose(0, 2, 1).astype(np.float64)
    return inside_KAB


def _times(demand: Demand, work_KAB: Real, tokens_KAB: Real, counts: range) -> Real:
    """Slots times the largest, by edges and number of slots; inf where tokens do not fit."""
    edges, times = np.arange(demand.distance), []
    for m in counts:
        # Jobs that begin at a or later and end at m − distance + b at the latest have no other slots.
        num_AB = (m - demand.distance + 1 + edges[None, :] - edges[:, None]).astype(np.float64)
        share_AB = 1.0 / np.where(num_AB > 0, num_AB, 1e-300)
        level_K = (work_KAB * share_AB).max(axis=(1, 2))
        has_room_K = (tokens_KAB * share_AB).max(axis=(1, 2)) <= demand.room
        times.append(np.where(has_room_K, m * (level_K + demand.fixed), np.inf))
    return np.stack(times, axis=1)


def _common_edges(demand: Demand) -> tuple[Whole, Whole]:
    """The edges that are best if all boundaries had the same, and the candidates for single boundaries."""
    distance, num_jobs = demand.distance, demand.work_RJ.shape[1]
    rounds = range(0, len(demand.counts), max(1, len(demand.counts) // _COMMON_ROUNDS))

    def time_s(edges_KJ: Whole) -> Real:
        total = np.zeros(len(edges_KJ))
        for r in rounds:
            total += _likely_s(demand, r, edges_KJ, edges_KJ)
        return total

    if distance**num_jobs <= MAX_TRIED:
        all_KJ = np.array(list(itertools.product(range(distance), repeat=num_jobs)), dtype=np.int64)
        return all_KJ[int(time_s(all_KJ).argmin())], all_KJ
    # Evenly spread jobs are a good start, and good themselves where jobs are alike.
    best_J, best = np.arange(num_jobs) * distance // num_jobs, np.inf
    while True:
        all_KJ = np.repeat(best_J[None, :], distance * num_jobs, axis=0)
        all_KJ[np.arange(len(all_KJ)), np.arange(len(all_KJ)) // distance] = np.arange(len(all_KJ)) % distance
        times = time_s(all_KJ)
        if times.min() >= best * (1 - 1e-9):
            return best_J, all_KJ
        best_J, best = all_KJ[int(times.argmin())], float(times.min())
