"""LoRAFusion's packing and grouping of jobs as published, which Weft's are compared with.

Packing (its algorithm 1): for every global batch of every group of jobs: greedy first fit decreasing; then, if there is
time, the fewest bins (MILP, stage 1) and among those the emptiest smallest bin (stage 2), kept only where better than
greedy. The emptiest bin comes last; a merge pass moves samples of the group's next global batch into it where the
capacity and the bubble lemma allow; verification inserts no-ops. Groups take turns. NP-hard; the time limit is per
solve.

Its authors' own solver on 2 cores (2,560 samples, 20 settings) took about a thousand times as long as greedy and
shortened the makespan by 0.8 % on average, never with fewer bins; so the default here is greedy.

Grouping: jobs of one group are packed together; groups follow each other. While other groups' microbatches run, the
last backward of a group's global batch comes back, so that its next one starts without waiting.

Problem: given the mean tokens of each job's global batch, and G groups, none empty: min variance of the groups' sums.
Method: head-tail pairing, jobs sorted by mean sample length and dealt back and forth, so that the shortest meets the
longest; then moves and swaps while the sums become more even, O(n²) per pass. Tests prove it never less even than the
pairing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.errors import PlanError
from weft.plan.pack.bins import Bins, fewest_bins, first_fit, min_bins, min_smallest
from weft.plan.pack.types import PackedRound, RoundLimits, RoundPlan, rounds_of
from weft.plan.types import JobQueue, Microbatch, Segment, with_empty_slots


def pack_published(
    jobs: Sequence[JobQueue],
    limits: RoundLimits,
    *,
    groups: Sequence[Sequence[str]] | None = None,
    time_limit_s: float = 0.0,
) -> RoundPlan:
    """Greedy packing with merge pass and no-ops; with a time limit per solve also the two MILP stages.

    Jobs of one group are packed together; by default all are one group.
    """
    rounds_of(jobs, limits)
    names = [list(g) for g in groups] if groups else [[q.job for q in jobs]]
    packed: list[list[Bins]] = []
    for group in names:
        own = [q for q in jobs if q.job in group and q.batches]
        samples = rounds_of(own, limits) if own else []
        packed.append([_pack(segments, limits, time_limit_s) for segments in samples])
    order = [bins for r in range(max(map(len, packed))) for rounds in packed for bins in rounds[r : r + 1]]
    fewest = [fewest_bins([s for own in bins for s in own], limits) for bins in order]
    _merge(order, limits)
    rounds = tuple(_round(i, bins, n) for i, (bins, n) in enumerate(zip(order, fewest, strict=True)))
    stream = with_empty_slots((m for r in rounds for m in r.slots), limits.lemma_distance)
    return RoundPlan(limits, rounds, stream, keeps_order=False)


def _round(index: int, bins: Bins, fewest: int) -> PackedRound:
    slots = tuple(Microbatch(tuple(sorted(own, key=lambda s: (s.job, s.step, s.index)))) for own in bins if own)
    largest = max((m.num_tokens for m in slots), default=0)
    return PackedRound(index, slots, fewest, float(len(slots) * largest), float(sum(m.num_tokens for m in slots)))


def _pack(segments: Sequence[Segment], limits: RoundLimits, time_limit_s: float) -> Bins:
    """The bins of one global batch, the emptiest last."""
    greedy = first_fit(segments, limits)
    best = greedy
    if time_limit_s > 0:
        solved = min_bins(segments, limits, len(greedy), time_limit_s).bins
        num_bins = min(len(greedy), len(solved)) if solved else len(greedy)
        emptiest = min_smallest(segments, limits, num_bins, time_limit_s).bins
        candidates = [bins for bins in (greedy, solved, emptiest) if bins]
        best = min(candidates, key=lambda bins: (len(bins), min(limits.taken(own) for own in bins)))
    return sorted(best, key=lambda own: -limits.taken(own))


def _merge(order: list[Bins], limits: RoundLimits) -> None:
    """Fills the last bin of each round with samples of the next, the longest that fit first."""
    for now, after in pairwise(order):
        for s in sorted((s for own in after for s in own), key=lambda s: (-s.length, s.job, s.index)):
            if limits.taken([*now[-1], s]) <= limits.room and _may_move(s, now, order, limits):
                now[-1].append(s)
                next(own for own in after if s in own).remove(s)
        # Bins that became empty are gone; the round itself stays, if only as a number to merge into.
        after[:] = [own for own in after if own] or [[]]


def _may_move(s: Segment, now: Bins, order: list[Bins], limits: RoundLimits) -> bool:
    """True if the job's batch before ended early enough for one of its next samples to stand in the last bin."""
    here = next(i for i, bins in enumerate(order) if bins is now)
    flat = [Microbatch(tuple(own)) for bins in order[max(0, here - limits.num_stages) : here + 1] for own in bins]
    flat[-1] = Microbatch((*flat[-1].segments, s))
    recent = [Microbatch(tuple(x for x in m.segments if x.job == s.job)) for m in flat]
    return not lemma_violations(recent, limits.lemma_distance)


def lemma_violations(stream: Sequence[Microbatch], apart: int) -> list[str]:
    """Where a job's next global batch comes less than `apart` microbatches after its last; empty if nowhere."""
    newest: dict[str, tuple[int, int]] = {}
    """Of each job: its latest batch so far, and the last microbatch that holds a sample of that or an earlier one."""
    before: dict[str, int] = {}
    """Of each job: the last microbatch that holds a sample of a batch before its latest."""
    problems: list[str] = []
    for number, microbatch in enumerate(stream):
        for job, step in sorted({(s.job, s.step) for s in microbatch.segments}):
            latest, last = newest.get(job, (step, number))
            if step < latest:
                problems.append(f"microbatch {number}: step {step} of {job} comes after its step {latest} has begun")
                continue
            if step > latest:
                before[job] = last
            if job in before and number < before[job] + apart:
                problems.append(
                    f"microbatch {number}: step {step} of {job} comes {number - before[job]} after the one before it; "
                    f"at least {apart} are needed"
                )
            newest[job] = (step, number)
    return problems


@dataclass(frozen=True, slots=True)
class JobLengths:
    """What grouping knows of a job."""

    job: str
    mean_length: float
    """Tokens of a sample, on average."""
    batch_size: int
    """Samples of a global batch."""

    @property
    def batch_tokens(self) -> float:
        """Tokens of a global batch, on average."""
        return self.mean_length * self.batch_size


@dataclass(frozen=True, slots=True)
class JobGroups:
    """Jobs that train together; the groups take turns in this order."""

    groups: tuple[tuple[str, ...], ...]
    batch_tokens: tuple[float, ...]
    """Of one global batch of every job of the group, on average."""


def improve(bucket_of: Sequence[int], weights: Sequence[float], num_buckets: int) -> list[int]:
    """Moves and swaps items between buckets, given per item, while the loads become more even."""
    best = list(bucket_of)
    loads = [sum(weight for weight, b in zip(weights, best, strict=True) if b == k) for k in range(num_buckets)]
    threshold = 1e-12 * sum(x * x for x in loads)
    changed = True
    while changed:
        changed = False
        for i, weight in enumerate(weights):
            source = best[i]
            # From the larger to the smaller load, d less here and d more there saves 2 d (difference − d). Moving a
            # item that is alone in its bucket saves nothing, so none becomes empty.
            target = min(range(num_buckets), key=loads.__getitem__)
            if weight * (loads[source] - loads[target] - weight) > threshold:
                best[i] = target
                loads[source], loads[target] = loads[source] - weight, loads[target] + weight
                changed = True
                continue
            for k in range(len(weights)):
                other, d = best[k], weight - weights[k]
                if d > 0 and d * (loads[source] - loads[other] - d) > threshold:
                    best[i], best[k] = other, source
                    loads[source], loads[other] = loads[source] - d, loads[other] + d
                    changed = True
                    break
    return best


def group_jobs(jobs: Sequence[JobLengths], num_groups: int) -> JobGroups:
    """Groups of nearly equal tokens; long jobs beside short ones."""
    _check(jobs)
    if not 1 <= num_groups <= len(jobs):
        raise PlanError(f"{len(jobs)} jobs cannot form {num_groups} groups; use 1 to {len(jobs)}.")
    ordered = sorted(jobs, key=lambda j: (j.mean_length, j.job))
    weights = [j.batch_tokens for j in ordered]
    group_of = improve(deal_head_tail(len(ordered), num_groups), weights, num_groups)
    members = [[i for i, number in enumerate(group_of) if number == g] for g in range(num_groups)]
    return JobGroups(
        groups=tuple(tuple(ordered[i].job for i in group) for group in members),
        batch_tokens=tuple(sum(weights[i] for i in group) for group in members),
    )


def deal_head_tail(num_jobs: int, num_groups: int) -> list[int]:
    """The group of each job in sorted order, dealt back and forth: 0 1 … G−1, G−1 … 1 0, and again.

    With two jobs per group, job i meets job 2G − 1 − i.
    """
    turn = [*range(num_groups), *reversed(range(num_groups))]
    return [turn[i % len(turn)] for i in range(num_jobs)]


def _check(jobs: Sequence[JobLengths]) -> None:
    if not jobs:
        raise PlanError("there are no jobs to group; give at least one.")
    if len({j.job for j in jobs}) != len(jobs):
        raise PlanError("two jobs have the same name; use each name once.")
    for job in jobs:
        if not job.mean_length > 0 or job.batch_size < 1:
            raise PlanError(
                f"mean length is {job.mean_length} and batch size {job.batch_size}; use more than 0, and at least 1.",
                where=job.job,
            )
