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
    """Maximum number of tokens of one microbatch."""
    num_stages: int = 1
    row_tile: int = 1
    """Rows of a microbatch are computed in whole tiles of this size."""
    unlike: float = 1.0
    """Cost of each row by which a microbatch differs from the others, relative to an empty row; with tiles only."""

    @property
    def lemma_distance(self) -> int:
        """Microbatches from a job's last sample of a global batch to its first of the next (published lemma)."""
        return lemma_distance(self.num_stages)

    @property
    def free_distance(self) -> int:
        """The distance at which no stage waits: with 1F1B as many microbatches are in flight as there are stages."""
        return self.num_stages


@dataclass(frozen=True, slots=True)
class PackedRound:
    index: int
    slots: tuple[Microbatch, ...]
    fewest: int
    """Lower bound of the number of microbatches with samples: by tokens, and one per stage."""
    time_s: float
    """Seconds on one stage, forward and backward, if every slot, empty ones too, lasts as long as the largest."""
    bound_s: float
    """Lower bound of `time_s` for any packing: all work evenly in the fewest slots, none below the longest sample."""

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


def rounds_of(jobs: Sequence[JobQueue]) -> list[tuple[Segment, ...]]:
    """The samples of each round; a PlanError if there is none, or a global batch whose samples have all run."""
    if not any(q.batches for q in jobs):
        raise PlanError("no job has a sample to pack; at least one global batch is needed.")
    for queue in jobs:
        for batch in queue.batches:
            if not batch.lengths:
                raise PlanError("holds no sample; it needs at least one.", where=f"job {queue.job} step {batch.step}")
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
