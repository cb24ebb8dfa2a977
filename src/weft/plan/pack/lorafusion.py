"""LoRAFusion's planner, as its paper has it (section 5.2, algorithm 1), on one device and in stages.

In stages, jobs are sorted by mean sample length and dealt back and forth into groups of two, so that the shortest meets
the longest (head-tail pairing). Groups take turns, global batch by global batch: while others run, the last backward of
a group's batch comes back. One device waits for nothing, so there all jobs are one group.

Problem, for one global batch of every job of a group: min number of microbatches, and then min tokens of the last one,
subject to the capacity. Each stage is a MILP, NP-hard; the greedy packing stands where time runs out or the solver
finds no better. Then a merge pass fills that last microbatch with samples of the following batch, where the capacity
and the pipeline's distance between a job's global batches allow, and no-ops are added where it is still too small.

Unlike LoRAFusion's, the packing keeps the order of each job's samples, in both MILPs and in the merge pass, so no bit
depends on the planner. `keep_order=False` is as published: first fit decreasing, the emptiest microbatch last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.plan.pack.bins import Bins, fewest_bins, first_fit, min_bins, min_smallest, taken
from weft.plan.pack.greedy import pack_lane, plan_lanes
from weft.plan.pack.types import RoundLimits, rounds_of
from weft.plan.planner import Planner
from weft.plan.program import Program, Step, Turn
from weft.plan.types import JobQueue, Limits, Microbatch, whole_batches, with_empty_slots

BUDGET_S = 2.0
"""Seconds for all solves of a program, which run beside training."""
_SOLVE_S = 0.5
_MOST_CELLS = 4_000
"""Samples times microbatches up to which a solver is started: larger MILPs are not solved in that time."""


@dataclass(frozen=True)
class LoraFusionPlanner(Planner):
    """The planner of one device, and what packs the microbatches of a pipeline (`pipeline/build.py`)."""

    num_stages: int = 1
    budget_s: float = BUDGET_S
    has_budget = True

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        num_lanes = len({queue.lane for queue in queues})
        planner = self.within(self.budget_s / max(num_lanes, 1))
        return plan_lanes(planner._plan_lane, whole_batches(queues, limits, self.num_stages), limits)

    def _plan_lane(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        if len({queue.priority for queue in queues}) > 1:
            # The order between priorities is a promise.
            return pack_lane(queues, limits)
        waiting = [replace(q, lane="", batches=tuple(b for b in q.batches if b.lengths)) for q in queues]
        waiting = [queue for queue in waiting if queue.batches]
        stream: tuple[Microbatch, ...] = ()
        if waiting:
            stream = pack_groups(
                pair_head_tail(waiting, self._num_groups(len(waiting))),
                RoundLimits(limits.capacity, self.num_stages),
                budget_s=self.budget_s,
                keep_order=any(queue.home is not None for queue in queues),
            )
        return Program.from_turns(_turns(queues, stream))

    def _num_groups(self, num_jobs: int) -> int:
        """Groups of two jobs, and two groups of two jobs: each needs another one to take turns with."""
        return 1 if self.num_stages == 1 else max(min(2, num_jobs), -(-num_jobs // 2))

    @property
    def quick(self) -> LoraFusionPlanner:
        """This planner without a solver."""
        return self.within(0.0)

    def within(self, budget_s: float) -> LoraFusionPlanner:
        return self if budget_s >= self.budget_s else replace(self, budget_s=budget_s)


def _turns(queues: Sequence[JobQueue], stream: Sequence[Microbatch]) -> list[Turn]:
    """The stream with every global batch's step after its last sample; at once where all samples have run."""
    last = {(s.job, s.step): k for k, m in enumerate(stream, start=1) for s in m.segments}
    due: list[list[Step]] = [[] for _ in range(len(stream) + 1)]
    for queue in queues:
        for batch in queue.batches:
            due[last.get((queue.job, batch.step), 0)].append(Step(queue.job, batch.step))
    return [Turn(m, tuple(steps)) for m, steps in zip([Microbatch(()), *stream], due, strict=True)]


def pair_head_tail(jobs: Sequence[JobQueue], num_groups: int) -> list[list[JobQueue]]:
    """Groups of jobs sorted by mean sample length, dealt 0 1 … G−1, G−1 … 1 0, and again: with two jobs per group, job
    i meets job 2G − 1 − i."""
    ordered = sorted(jobs, key=lambda queue: (_mean_length(queue), queue.job))
    turn = [*range(num_groups), *reversed(range(num_groups))]
    return [[q for i, q in enumerate(ordered) if turn[i % len(turn)] == group] for group in range(num_groups)]


def _mean_length(job: JobQueue) -> float:
    lengths = [n for batch in job.batches for n in batch.lengths]
    return sum(lengths) / len(lengths)


def pack_groups(
    groups: Sequence[Sequence[JobQueue]], limits: RoundLimits, *, budget_s: float = 0.0, keep_order: bool
) -> tuple[Microbatch, ...]:
    """The stream of groups that take turns, no-ops included. Once `budget_s` has passed, no solver is started."""
    until = time.perf_counter() + budget_s
    rounds = []
    for number in range(max(len(queue.batches) for group in groups for queue in group)):
        for group in groups:
            own = [replace(queue, batches=queue.batches[number : number + 1]) for queue in group]
            own = [queue for queue in own if queue.batches]
            rounds += [_pack(own, limits, until, keep_order=keep_order)] if own else []
    stream = _merged(rounds, limits, keep_order=keep_order)
    in_order = (tuple(sorted(own, key=lambda s: (s.job, s.step, s.index))) for own in stream)
    return with_empty_slots(map(Microbatch, in_order), limits.lemma_distance)


def _pack(queues: Sequence[JobQueue], limits: RoundLimits, until: float, *, keep_order: bool) -> Bins:
    """The bins of one global batch of every job, the emptiest last where the order allows it."""
    (segments,) = rounds_of(queues)
    room = limits.capacity
    if keep_order:
        packed = pack_lane([replace(q, is_all=True) for q in queues], Limits(room, sys.maxsize))
        greedy = [list(m.segments) for m in packed.microbatches]
    else:
        greedy = first_fit(segments, room)
    found, num_bins = [greedy], len(greedy)
    if len(greedy) * len(segments) <= _MOST_CELLS:
        if num_bins > fewest_bins(segments, room) and (left_s := until - time.perf_counter()) > 0:
            solved = min_bins(segments, room, num_bins, min(left_s, _SOLVE_S), keep_order=keep_order)
            found += [solved] if solved else []
            num_bins = min(map(len, found))
        if num_bins > 1 and (left_s := until - time.perf_counter()) > 0:
            solved = min_smallest(segments, room, num_bins, min(left_s, _SOLVE_S), keep_order=keep_order)
            found += [solved] if solved else []
    if not keep_order:
        found = [sorted(bins, key=lambda own: -taken(own)) for bins in found]
    return min(found, key=lambda bins: (len(bins), taken(bins[-1])))


def _merged(rounds: Sequence[Bins], limits: RoundLimits, *, keep_order: bool) -> Bins:
    """The bins of all rounds in order. Before each round is added, the last bin takes samples of it: the next one of
    each job, or else the longest that fit."""
    stream: Bins = []
    ended: dict[str, int] = {}
    """Index of the last bin with samples of each job's last global batch."""
    for bins in rounds:
        samples = [s for own in bins for s in own]
        if not keep_order:
            samples.sort(key=lambda s: (-s.length, s.job, s.index))
        here, moved, stuck = len(stream) - 1, set(), set[str]()
        for s in samples if stream else ():
            is_free = s.job not in ended or here - ended[s.job] >= limits.lemma_distance
            if is_free and s.job not in stuck and taken([*stream[-1], s]) <= limits.capacity:
                stream[-1].append(s)
                moved.add(s)
            elif keep_order:
                stuck.add(s.job)
        ended |= {s.job: here for s in moved}
        for own in ([s for s in own if s not in moved] for own in bins):
            ended |= {s.job: len(stream) for s in own}
            stream += [own] if own else []
    return stream
