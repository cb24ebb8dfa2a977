"""Tasks that share a backbone, fused tasks, and what a fused task costs on every stage of the pipeline.

A fused task runs one microbatch of each of its tasks as one batch; all tasks have the same number C of microbatches. On
stage s of S one pass of a fused task H takes

    t_s(H) = base_s(lengths of all samples) + Σ adapter_k

the backbone's own time and that of the adapters. Alone in the pipeline, H takes

    L(H) = Σ_s p_s − max_s p_s + C · max_s p_s,   p_s = forward + backward on stage s

warm-up and drain, then the steady phase paced by the slowest stage. Stage s holds up to S − s microbatches between
their forward and their backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.errors import PlanError
from weft.plan.cost.types import CostModel


@dataclass(frozen=True, slots=True)
class FuseTask:
    """A job as fusion sees it: the samples of one of its microbatches."""

    job: str
    lengths: tuple[int, ...]
    adapter_s: float = 0.0
    """Seconds of one pass of its adapters on one stage, beyond the cost model."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class FusedTask:
    """Tasks that run as one batch (an hTask)."""

    tasks: tuple[FuseTask, ...]

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(t.job for t in self.tasks)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(t.lengths for t in self.tasks))

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.tasks)

    @property
    def adapter_s(self) -> float:
        return sum(t.adapter_s for t in self.tasks)


@dataclass(frozen=True)
class Pipe:
    cost: CostModel
    num_stages: int = 1
    num_microbatches: int = 8
    free_bytes: tuple[int, ...] | None = None
    """Bytes of each stage for activations, beside backbone and adapters; None: unlimited."""

    def forward_s(self, fused: FusedTask, stage: int) -> float:
        return self.cost.forward_s(fused.lengths, stage) + fused.adapter_s

    def backward_s(self, fused: FusedTask, stage: int) -> float:
        """One microbatch backward; adapters take as long as forward."""
        return self.cost.backward_s(fused.lengths, stage) + fused.adapter_s

    def passes_s(self, fused: FusedTask) -> list[float]:
        lengths, adapters = fused.lengths, fused.adapter_s
        stages = range(self.num_stages)
        return [self.cost.forward_s(lengths, s) + self.cost.backward_s(lengths, s) + 2 * adapters for s in stages]

    def latency_s(self, passes_s: Sequence[float]) -> float:
        slowest = max(passes_s)
        return sum(passes_s) - slowest + self.num_microbatches * slowest

    def fits(self, fused: FusedTask) -> bool:
        """True if every stage has room for its steady state of S − stage microbatches. A task that is not fused can be
        launched less eagerly: one microbatch must fit."""
        if self.free_bytes is None:
            return True
        lengths = fused.lengths
        is_lone = len(fused.tasks) == 1
        return all(
            self.cost.held_bytes(lengths, stage) * (1 if is_lone else self.num_stages - stage) <= free
            for stage, free in enumerate(self.free_bytes)
        )


CostTable = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fusion:
    fused: tuple[FusedTask, ...]
    """From the fewest tokens per task to the most."""
    latency_s: float
    """F(n, m): predicted seconds of one global batch of every task."""


def fuse(tasks: Sequence[FuseTask], pipe: Pipe) -> Fusion:
    """The partition of least predicted latency; among equals the one with the fewest fused tasks."""
    return min(fuse_by_count(tasks, pipe), key=lambda f: (f.latency_s, len(f.fused)))


def fuse_by_count(tasks: Sequence[FuseTask], pipe: Pipe) -> tuple[Fusion, ...]:
    """The best partition into 1, 2, …, n fused tasks, without counts that exceed memory."""
    ordered = sorted(tasks, key=lambda t: (t.num_tokens, t.job))
    first_N, added_NN = _price(ordered, pipe)
    rows, choices = [first_N], []
    for _ in range(1, len(ordered)):
        # Row l, column i: the first l + 1 tasks are done, one more fused task holds l + 1 … i.
        through_NN = rows[-1][:-1, None] + added_NN[1:, :]
        choice_N = np.argmin(through_NN, axis=0)
        choices.append(choice_N)
        rows.append(through_NN[choice_N, np.arange(len(ordered))])
    return tuple(
        Fusion(_trace(ordered, choices[:count]), float(row_N[-1]))
        for count, row_N in enumerate(rows)
        if np.isfinite(row_N[-1])
    )


def _price(ordered: Sequence[FuseTask], pipe: Pipe) -> tuple[CostTable, CostTable]:
    """L of tasks 0 … i, and C · mean pass of tasks l … i; infinite where they do not fit or l > i."""
    num_tasks = len(ordered)
    first_N = np.full(num_tasks, np.inf)
    added_NN = np.full((num_tasks, num_tasks), np.inf)
    for low in range(num_tasks):
        for high in range(low, num_tasks):
            fused = FusedTask(tuple(ordered[low : high + 1]))
            if not pipe.fits(fused):
                if low == high:
                    raise PlanError(
                        f"one microbatch of {fused.num_tokens} tokens does not fit in the stages' free bytes "
                        f"{pipe.free_bytes}; use smaller microbatches.",
                        where=ordered[low].job,
                    )
                break
            passes_s = pipe.passes_s(fused)
            added_NN[low, high] = pipe.num_microbatches * sum(passes_s) / pipe.num_stages
            if low == 0:
                first_N[high] = pipe.latency_s(passes_s)
    return first_N, added_NN


def _trace(ordered: Sequence[FuseTask], choices: Sequence[npt.NDArray[np.intp]]) -> tuple[FusedTask, ...]:
    """The fused tasks of F(n, len(choices) + 1), from the last cut back to the first."""
    fused: list[FusedTask] = []
    last = len(ordered) - 1
    for choice_N in reversed(choices):
        cut = int(choice_N[last])
        fused.append(FusedTask(tuple(ordered[cut + 1 : last + 1])))
        last = cut
    fused.append(FusedTask(tuple(ordered[: last + 1])))
    return tuple(reversed(fused))
