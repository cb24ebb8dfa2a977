"""How fast jobs go together on one backbone instance, from a cost model.

An instance runs microbatches of at most `capacity` tokens. Every job puts in up to an equal share of it, but no more
than its global batch, because its next one needs its step first; what one leaves the others take. So

    tokens of job i in a microbatch   a_i = min(step_tokens_i, level),  with Σ a_i ≤ capacity
    its speed                         a_i / time of a microbatch of Σ a_i tokens

Rows are computed in whole tiles, so a small job alone pays for a tile it does not fill. That is what sharing gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.cost.rows import GPU_ROW_TILE
from weft.cost.types import CostModel, LinearCost
from weft.errors import PlanError

H200_8B = LinearCost(token_s=1 / (2 * 17_400))
"""Llama-3.1-8B in bf16 with adapters of rank 16 on one H200: 17,400 tokens/s, `benchmarks/h200.json`."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One copy of the backbone and how many jobs may share it."""

    cost: CostModel = H200_8B
    capacity: int = 8192
    """Tokens of a microbatch."""
    row_tile: int = GPU_ROW_TILE
    """Rows are computed in multiples of it."""
    job_bytes: int = 80 * 10**9
    """Memory for adapters and optimizers beside the backbone and its activations."""
    max_jobs: int | None = None
    """Most jobs at a time; 1 is what a framework without sharing does."""

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.row_tile < 1:
            raise PlanError(
                f"capacity is {self.capacity} and row_tile {self.row_tile}; both must be at least 1.", where="instance"
            )

    def fits(self, num_jobs: int, num_bytes: int) -> bool:
        """Whether so many jobs with so many bytes may share the instance."""
        return num_bytes <= self.job_bytes and (self.max_jobs is None or num_jobs <= self.max_jobs)

    def microbatch_s(self, num_tokens: int) -> float:
        """One microbatch forward and back."""
        rows = (-(-num_tokens // self.row_tile) * self.row_tile,)
        return self.cost.forward_s(rows, 0) + self.cost.backward_s(rows, 0)

    def rates(self, step_tokens: Sequence[int]) -> list[float]:
        """Tokens per second of jobs that share the instance."""
        shares = fill_level(step_tokens, self.capacity)
        if not shares:
            return []
        seconds = self.microbatch_s(round(sum(shares)))
        return [share / seconds for share in shares]

    @property
    def peak_rate(self) -> float:
        """Tokens per second with full microbatches."""
        return self.capacity / self.microbatch_s(self.capacity)


def fill_level(wants: Sequence[int], capacity: int) -> list[float]:
    """What each gets when all are filled to one level but none above what it wants: max-min fair, O(n log n)."""
    shares = [0.0] * len(wants)
    free = float(capacity)
    order = sorted(range(len(wants)), key=wants.__getitem__)
    for place, i in enumerate(order):
        shares[i] = min(float(wants[i]), free / (len(order) - place))
        free -= shares[i]
    return shares
