"""How fast jobs go together on one backbone instance: Weft's, and what others would make of the same GPU.

An instance runs microbatches of at most `capacity` rows. Every job puts in up to an equal share of it, but no more than
its global batch, because its next one needs its step first; what one leaves the others take. So

    rows of job i in a microbatch   a_i = min(rows_i, level),  with Σ a_i ≤ capacity
    its speed                       a_i · tokens_i / rows_i  over the time of a microbatch of Σ a_i rows

rows_i are the tokens of its global batch with what they are padded by. Packed samples have no padding, but rows are
computed in whole tiles, so that a small job alone pays for a tile it does not fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.planning.replay.trace import TraceJob
from weft.errors import PlanError
from weft.plan.cost.shape import GPU_ROW_TILE
from weft.plan.cost.types import CostModel, LinearCost

H200_8B = LinearCost(token_s=1 / (2 * 17_400))
"""Llama-3.1-8B in bf16 with adapters of rank 16 on one H200: 17,400 tokens/s, `benchmarks/h200.json`."""
PEFT_ROWS_S = 10_672
"""Rows a second of PEFT with its best batch there (`peft_best_512to1024_rows_s`)."""
PEFT_LAUNCH_S = 256 / 1303
"""Seconds of its step when the host sets the pace (`peft_solo_256_tok_s`): no step takes less."""
PEFT_8B = LinearCost(token_s=1 / (2 * PEFT_ROWS_S))


@dataclass(frozen=True, slots=True)
class Instance:
    """One copy of the backbone and how many jobs may share it."""

    cost: CostModel = H200_8B
    capacity: int = 8192
    """Rows of a microbatch."""
    row_tile: int = GPU_ROW_TILE
    """Rows are computed in multiples of it."""
    job_bytes: int = 80 * 10**9
    """Memory for adapters and optimizers beside the backbone and its activations."""
    max_jobs: int | None = None
    """Most jobs at a time; 1 is what a framework without sharing does."""
    padding: Literal["none", "own", "fused"] = "none"
    """To the longest sample of each job's own batch, or of all batches in a microbatch."""
    launch_s: float = 0.0
    """No microbatch takes less."""

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.row_tile < 1:
            raise PlanError(
                f"capacity is {self.capacity} and row_tile {self.row_tile}; both must be at least 1.", where="instance"
            )

    def fits(self, num_jobs: int, num_bytes: int) -> bool:
        """Whether so many jobs with so many bytes may share the instance."""
        return num_bytes <= self.job_bytes and (self.max_jobs is None or num_jobs <= self.max_jobs)

    def microbatch_s(self, num_rows: int) -> float:
        """One microbatch forward and back."""
        rows = (-(-num_rows // self.row_tile) * self.row_tile,)
        return max(self.launch_s, self.cost.forward_s(rows, 0) + self.cost.backward_s(rows, 0))

    def rates(self, jobs: Sequence[TraceJob]) -> list[float]:
        """Tokens per second, padding not counted, of jobs that share the instance."""
        if not jobs:
            return []
        rows = self._rows(jobs)
        shares = fill_level(rows, self.capacity)
        seconds = self.microbatch_s(round(sum(shares)))
        return [share * job.step_tokens / own / seconds for share, job, own in zip(shares, jobs, rows, strict=True)]

    @property
    def peak_rate(self) -> float:
        """Rows per second with full microbatches."""
        return self.capacity / self.microbatch_s(self.capacity)

    def _rows(self, jobs: Sequence[TraceJob]) -> list[int]:
        """Rows of each job's global batch."""
        if self.padding == "none":
            return [job.step_tokens for job in jobs]
        if self.padding == "own":
            return [job.num_samples * job.padded_to for job in jobs]
        longest = max(job.padded_to for job in jobs)
        return [job.num_samples * longest for job in jobs]


PEFT = Instance(PEFT_8B, row_tile=1, max_jobs=1, padding="own", launch_s=PEFT_LAUNCH_S)
"""One job on each instance with Hugging Face PEFT, as measured, padded to the longest of each batch."""


def fill_level(wants: Sequence[int], capacity: int) -> list[float]:
    """What each gets when all are filled to one level but none above what it wants: max-min fair, O(n log n)."""
    shares = [0.0] * len(wants)
    free = float(capacity)
    order = sorted(range(len(wants)), key=wants.__getitem__)
    for index, i in enumerate(order):
        shares[i] = min(float(wants[i]), free / (len(order) - index))
        free -= shares[i]
    return shares
