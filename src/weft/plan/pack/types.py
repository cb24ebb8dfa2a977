"""A packed schedule as data: rounds of microbatches, the stream that a pipeline runs, and proven bounds.

A round holds the next global batch of every job that still has one. Its microbatches are in consecutive slots; an empty
slot is a no-op. The stream is all rounds in order, which `plan/pipeline` turns into programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.types import JobQueue, Microbatch, Segment, lemma_distance

TOLERANCE = 0.01
"""Relative distance from the lower bound within which a round counts as optimal; cost models are no more exact."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    capacity: int
    """Most tokens of one microbatch, padding included."""
    num_stages: int = 1
    padding_multiple: int = 1
    """Multiple to which the tokens of one job are padded in each microbatch."""
    row_tile: int = 1
    """Rows of a microbatch are computed in whole tiles of this size."""
    unlike: float = 1.0
    """Cost of a row more or less than other microbatches, relative to an empty row; with tiles only."""

    def __post_init__(self) -> None:
        if min(self.padding_multiple, self.num_stages, self.row_tile) < 1:
            raise PlanError(
                f"padding multiple {self.padding_multiple} with {self.num_stages} stages and tiles of {self.row_tile} "
                "rows; all must be at least 1."
            )
        if self.capacity < self.padding_multiple:
            raise PlanError(
                f"the capacity is {self.capacity} tokens; it must be at least the padding multiple, "
                f"{self.padding_multiple}."
            )

    @property
    def room(self) -> int:
        return self.capacity // self.padding_multiple * self.padding_multiple

    @property
    def lemma_distance(self) -> int:
        """Microbatches from a job's last sample of a global batch to its first of the next (published lemma)."""
        return lemma_distance(self.num_stages)

    @property
    def free_distance(self) -> int:
        """The distance at which no stage waits: with 1F1B as many microbatches are in flight as there are stages."""
        return self.num_stages

    def padded(self, num_tokens: int) -> int:
        return -(-num_tokens // self.padding_multiple) * self.padding_multiple

    def taken(self, segments: Sequence[Segment]) -> int:
        """Tokens of these segments in one microbatch, padding included."""
        tokens: dict[str, int] = {}
        for s in segments:
            tokens[s.job] = tokens.get(s.job, 0) + s.length
        return sum(map(self.padded, tokens.values()))


@dataclass(frozen=True, slots=True)
class PackedRound:
    index: int
    slots: tuple[Microbatch, ...]
    fewest: int
    """Lower bound of the number of microbatches with samples: by tokens, and one per stage."""
    time_s: float
    """Seconds on one stage, forward and backward, if every slot, empty ones too, lasts as long as the largest."""
    bound_s: float
    """Lower bound of it for any packing: all work evenly in the fewest slots, none below the longest sample."""

    @property
    def num_microbatches(self) -> int:
        return sum(1 for m in self.slots if m.segments)

    @property
    def is_fewest(self) -> bool:
        return self.num_microbatches <= self.fewest

    @property
    def gap(self) -> float:
        """Upper bound of the relative distance from the shortest packing."""
        return self.time_s / self.bound_s - 1.0 if self.bound_s else 0.0

    @property
    def is_proven(self) -> bool:
        """True if no packing has fewer microbatches, or is shorter by more than the tolerance."""
        return self.is_fewest or self.gap <= TOLERANCE


@dataclass(frozen=True, slots=True)
class RoundPlan:
    limits: RoundLimits
    rounds: tuple[PackedRound, ...]
    stream: tuple[Microbatch, ...]
    """All microbatches in order, no-ops included."""
    keeps_order: bool
    """True if every job's samples run in the job's own order: then an adapter's bits do not depend on the plan."""

    @property
    def num_microbatches(self) -> int:
        return sum(1 for m in self.stream if m.segments)


def rounds_of(jobs: Sequence[JobQueue], limits: RoundLimits) -> list[tuple[Segment, ...]]:
    """The samples of each round; a PlanError for queues that cannot be planned."""
    if not any(q.batches for q in jobs):
        raise PlanError("no job has a sample to pack; at least one global batch is needed.")
    names = [q.job for q in jobs]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise PlanError(f"job {twice} is listed twice; every job needs a name of its own.")
    for queue in jobs:
        if queue.lane or any(batch.groups for batch in queue.batches):
            raise PlanError("has a lane or groups of samples; pipelines are planned without.", where=f"job {queue.job}")
        for batch in queue.batches:
            if not batch.lengths:
                raise PlanError("holds no sample; it needs at least one.", where=f"job {queue.job} step {batch.step}")
            worst = max(batch.lengths)
            if limits.padded(worst) > limits.room or min(batch.lengths) < 1:
                bad = worst if limits.padded(worst) > limits.room else min(batch.lengths)
                raise PlanError(
                    f"a sample has {bad} tokens; a microbatch holds 1 to {limits.room}.",
                    where=f"job {queue.job} step {batch.step} sample {batch.first + batch.lengths.index(bad)}",
                )
    num_rounds = max(len(q.batches) for q in jobs)
    return [
        tuple(
            Segment(q.job, q.batches[r].step, q.batches[r].first + i, n)
            for q in jobs
            if r < len(q.batches)
            for i, n in enumerate(q.batches[r].lengths)
        )
        for r in range(num_rounds)
    ]
