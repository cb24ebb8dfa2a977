"""Packs jobs' global batches, round by round, into even microbatches that leave no bubble.

Problem, for every round: min m · (largest microbatch), over the number of slots m and the slot of every sample, subject
to the capacity after padding and to the bubble lemma between rounds (windows of `layout.py`). Lower bound of a round's
time on a stage: all samples' work plus the fixed cost of the fewest microbatches (`bounds.py`, and one per stage).

Method: numbers of slots in order of their bound; for each, even filling (`balance.py`, or `ordered.py` where every
job's order is to be kept); the first that fits and cannot be beaten by those left is taken. Where tokens are so tight
that nothing fits the fewest slots, an exact solver, within the budget, either packs them or proves that one more is
needed. O(samples · log) in all but those rounds. Rounds of the same lengths are packed once.

Measured (Nov 2026, 2 cores): 25,600 samples of 4 jobs, 4 stages, about 3 s (`measure_pack` in `bench/plan_pack.py`).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from weft.errors import PlanError
from weft.plan.cost.types import CostModel, LinearCost
from weft.plan.lemma import with_empty_slots
from weft.plan.pack.balance import Whole
from weft.plan.pack.bounds import fewest_bins
from weft.plan.pack.layout import Demand, choose_slots, round_s, slot_counts
from weft.plan.pack.packer import Packer, PackingWork, RoundTask
from weft.plan.pack.types import TOLERANCE, PackedRound, RoundLimits, RoundPlan, rounds_of
from weft.plan.types import JobQueue, Microbatch, Segment

_SPARE_SAMPLES = 8
"""Work that ranges of slots should have to spare when places are chosen, in typical samples: about one slot of nine."""
_LOOKED_AHEAD = 8
"""Rounds after those to pack that have a say in where their jobs end."""


def pack_rounds(
    jobs: Sequence[JobQueue],
    limits: RoundLimits,
    *,
    cost: CostModel | None = None,
    budget_s: float = 2.0,
    keep_order: bool = False,
    behind: Sequence[Microbatch] = (),
    previous: RoundPlan | None = None,
    num_started: int = 0,
    max_rounds: int | None = None,
    num_workers: int = 1,
) -> RoundPlan:
    """Even microbatches for every round, with their lower bounds; deterministic unless the budget runs out.

    `behind`: microbatches that run right before the first round; who is in the last of them has to wait.
    With `previous`, its first `num_started` rounds stay as they are and `jobs` lists what comes after them: jobs may
    have come or gone, and only rounds not yet started are packed. `max_rounds` packs no more than so many, for planning
    while training runs. Once `budget_s` has passed no solver is asked any more. More
    than one worker starts new processes, which pays from about 50,000 samples on.
    """
    if num_workers < 1 or (max_rounds is not None and max_rounds < 1):
        raise PlanError(f"{num_workers} workers, {max_rounds} rounds at most; both must be at least 1.")
    samples = rounds_of(jobs, limits)
    num_rounds = len(samples) if max_rounds is None else min(max_rounds, len(samples))
    # What follows decides where jobs should end, not how they are packed.
    samples = samples[: num_rounds + _LOOKED_AHEAD]
    work = PackingWork(cost or LinearCost(), limits.num_stages, limits.room, limits.row_tile)
    started = previous.rounds[:num_started] if previous else ()
    before = [*behind, *(m for r in started for m in r.slots)]
    to_pack = _RoundsToPack.of(samples, limits, work)
    is_end = num_rounds == len(samples) and all(q.is_all for q in jobs)
    places = choose_slots(to_pack.demand, to_pack.slots_after(before), is_end=is_end)[: num_rounds + 1]
    tasks = [to_pack.task(r, places[r], places[r + 1]) for r in range(num_rounds)]
    packer = Packer(limits, work, keep_order)
    packed = _run(packer, tasks, len(started), budget_s, num_workers)
    _widen(to_pack, packer, packed, before, places[-1])
    rounds = (*started, *packed)
    stream = with_empty_slots((m for r in rounds for m in r.slots), limits.lemma_distance)
    return RoundPlan(limits, rounds, stream, keep_order and (previous is None or previous.keeps_order))


@dataclass(frozen=True)
class _RoundsToPack:
    """All rounds to pack, and what their jobs ask of slots."""

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
        fewest = [fewest_bins(segments, limits) for segments in samples]
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
                room=limits.room,
            ),
        )

    def task(self, r: int, before_J: Whole, after_J: Whole) -> RoundTask:
        """Round r, with the jobs' places before and after it."""
        times = round_s(self.demand, r, before_J[None, :], after_J[None, :])[0]
        bounds = dict(zip(self.demand.counts[r], times.tolist(), strict=True))
        places = {j: (int(before_J[i]), int(after_J[i])) for j, i in self.number.items()}
        return RoundTask(self.samples[r], self.fewest[r], places, bounds)

    def slots_after(self, slots: Sequence[Microbatch]) -> Whole:
        """First slots the jobs may use after these: who ran in one of the last has to wait."""
        distance = self.demand.distance
        first_J = np.zeros(len(self.number), dtype=np.int64)
        tail = slots[max(0, len(slots) - distance + 1) :]
        for place, microbatch in enumerate(tail, distance - len(tail)):
            for s in microbatch.segments:
                if s.job in self.number:
                    first_J[self.number[s.job]] = place
        return first_J

    def slots_before(self, slots: Sequence[Microbatch]) -> Whole:
        """The same seen from the other side: how late jobs may run before these slots."""
        last_J = np.full(len(self.number), self.demand.distance - 1, dtype=np.int64)
        for place, microbatch in reversed(list(enumerate(slots[: self.demand.distance - 1]))):
            for s in microbatch.segments:
                last_J[self.number[s.job]] = place
        return last_J


def _widen(
    to_pack: _RoundsToPack, packer: Packer, packed: list[PackedRound], before: Sequence[Microbatch], end_J: Whole
) -> None:
    """Tries rounds that are not proven again, with the places their neighbours have left free."""
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


def _run(
    packer: Packer, tasks: Sequence[RoundTask], start: int, budget_s: float, num_workers: int
) -> list[PackedRound]:
    """Packs all rounds, in so many processes."""
    share = -(-len(tasks) // num_workers)
    places = range(0, len(tasks), share)
    if len(places) == 1:
        return packer.run(tasks, start, budget_s)
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = [tasks[i : i + share] for i in places]
        done = pool.map(packer.run, parts, [start + i for i in places], [budget_s] * len(parts))
        return [r for part in done for r in part]
