"""A packed schedule as data: rounds of microbatches, the stream a pipeline runs, and what is proven about both.

A round holds the next global batch of every job that still has one. Its microbatches stand in slots, one after
another; an empty slot is a no-op. The stream is all rounds in order, and what `plan/pipeline` turns into programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.lemma import lemma_distance
from weft.plan.types import JobQueue, Microbatch, Segment

TOLERANCE = 0.01
"""A round this close to its lower bound counts as optimal; cost models are no more exact."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What a microbatch may hold, and the pipeline it has to pass."""

    capacity: int
    """Most tokens of one microbatch, padding included."""
    num_stages: int = 1
    padding_multiple: int = 1
    """In each microbatch the tokens of one job are padded to a multiple of this."""
    row_tile: int = 1
    """Rows of a microbatch are computed in whole tiles of so many."""
    unlike: float = 1.0
    """With tiles: what a row more or less than other microbatches have counts against an empty one."""

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
        """Most tokens that padded jobs can fill."""
        return self.capacity // self.padding_multiple * self.padding_multiple

    @property
    def lemma_distance(self) -> int:
        """Microbatches from a job's last sample of a global batch to its first of the next (published lemma)."""
        return lemma_distance(self.num_stages)

    @property
    def free_distance(self) -> int:
        """The same, such that no stage waits: with 1F1B as many microbatches are under way as there are stages."""
        return self.num_stages

    def padded(self, num_tokens: int) -> int:
        """Tokens that one job's tokens take in one microbatch."""
        return -(-num_tokens // self.padding_multiple) * self.padding_multiple

    def taken(self, segments: Sequence[Segment]) -> int:
        """Tokens that these segments take in one microbatch, padding included."""
        tokens: dict[str, int] = {}
        for s in segments:
            tokens[s.job] = tokens.get(s.job, 0) + s.length
        return sum(map(self.padded, tokens.values()))


@dataclass(frozen=True, slots=True)
class PackedRound:
    """One global batch of every job, in slots."""

    index: int
    slots: tuple[Microbatch, ...]
    fewest: int
    """Lower bound of the number of microbatches that hold samples: what the tokens need, and one per stage."""
    time_s: float
    """Time on one stage, forward and backward, if every slot, empty ones too, lasts as long as the largest."""
    bound_s: float
    """The same of the best packing at least: all work evenly in the fewest slots, none below the longest sample."""

    @property
    def num_microbatches(self) -> int:
        """Slots that hold samples."""
        return sum(1 for m in self.slots if m.segments)

    @property
    def is_fewest(self) -> bool:
        """True if no packing has fewer microbatches without leaving a stage idle."""
        return self.num_microbatches <= self.fewest

    @property
    def gap(self) -> float:
        """How much longer the round takes than any packing must, at most, as a share of that."""
        return self.time_s / self.bound_s - 1.0 if self.bound_s else 0.0

    @property
    def is_proven(self) -> bool:
        """True if no packing has fewer microbatches, or none can be shorter by more than the tolerance."""
        return self.is_fewest or self.gap <= TOLERANCE


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Rounds and the stream of microbatches made from them."""

    limits: RoundLimits
    rounds: tuple[PackedRound, ...]
    stream: tuple[Microbatch, ...]
    """All microbatches in order; an empty one is a no-op."""
    keeps_order: bool
    """True if every job's samples run in the job's own order: then an adapter's bits do not depend on the plan."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches with samples."""
        return sum(1 for m in self.stream if m.segments)

    @property
    def num_empty_slots(self) -> int:
        """Empty microbatches, there only to keep distances."""
        return len(self.stream) - self.num_microbatches

    @property
    def fewest(self) -> int:
        """Lower bound of the number of microbatches, round by round."""
        return sum(r.fewest for r in self.rounds)

    @property
    def over_lower_bound(self) -> float:
        """Microbatches above the lower bound, as a share of it."""
        return self.num_microbatches / self.fewest - 1.0

    @property
    def proven_share(self) -> float:
        """Share of the rounds proven optimal, in number or in time."""
        return sum(r.is_proven for r in self.rounds) / len(self.rounds)

    @property
    def fewest_share(self) -> float:
        """Share of the rounds proven to have the fewest microbatches."""
        return sum(r.is_fewest for r in self.rounds) / len(self.rounds)

    @property
    def fill(self) -> float:
        """Share of the microbatches' capacity that holds tokens."""
        return sum(m.num_tokens for m in self.stream) / (max(self.num_microbatches, 1) * self.limits.capacity)


def rounds_of(jobs: Sequence[JobQueue], limits: RoundLimits) -> list[tuple[Segment, ...]]:
    """The samples of each round; refuses what no plan could hold."""
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
