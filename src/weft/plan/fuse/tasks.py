"""Tasks that share a backbone, fused tasks, and what a fused task costs on every stage of the pipeline.

A fused task runs one microbatch of each of its tasks as one batch; all tasks have the same number C of microbatches. On
stage s of S one pass of a fused task H takes

    t_s(H) = base_s(lengths of all samples) + max(Σ share_k · adapter_k, max_k adapter_k)

the backbone's own time and that of the adapters, fused side by side: together they need the sum of their shares of the
device, and never less than the slowest. Alone in the pipeline, H takes

    L(H) = Σ_s p_s − max_s p_s + C · max_s p_s,   p_s = forward + backward on stage s

warm-up and drain, then the steady phase paced by the slowest stage. Stage s holds up to S − s microbatches between
their forward and their backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.cost.types import CostModel


@dataclass(frozen=True, slots=True)
class FuseTask:
    """What fusion knows of a job: the samples of one of its microbatches."""

    job: str
    lengths: tuple[int, ...]
    """Tokens of each sample, after alignment."""
    adapter_s: float = 0.0
    """One pass of its adapters on one stage, if they had the device for themselves, beyond what the cost model says."""
    adapter_share: float = 1.0
    """Part of the device its adapters keep busy."""

    @property
    def num_tokens(self) -> int:
        """Tokens of one microbatch."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class FusedTask:
    """Tasks that run as one batch (an hTask)."""

    tasks: tuple[FuseTask, ...]

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs, in the order of their samples."""
        return tuple(t.job for t in self.tasks)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every sample of one microbatch."""
        return tuple(itertools.chain.from_iterable(t.lengths for t in self.tasks))

    @property
    def num_tokens(self) -> int:
        """Tokens of one microbatch."""
        return sum(t.num_tokens for t in self.tasks)


@dataclass(frozen=True)
class Pipe:
    """The pipeline the tasks share."""

    cost: CostModel
    num_stages: int = 1
    num_microbatches: int = 8
    """Of every task, per global batch."""
    free_bytes: tuple[int, ...] | None = None
    """What each stage has for activations, backbone and adapters already taken off; None: as much as it takes."""

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_microbatches < 1:
            raise PlanError(
                f"num_stages is {self.num_stages} and num_microbatches {self.num_microbatches}; use at least 1."
            )
        if self.free_bytes is not None and len(self.free_bytes) != self.num_stages:
            raise PlanError(
                f"free_bytes has {len(self.free_bytes)} entries; use one for each of {self.num_stages} stages."
            )
        for stage, free in enumerate(self.free_bytes or ()):
            if free <= 0:
                raise PlanError(f"stage {stage} has {free} bytes free for activations; it needs more than 0.")

    def forward_s(self, fused: FusedTask, stage: int) -> float:
        """One microbatch forward through one stage."""
        return self.cost.forward_s(fused.lengths, stage) + adapters_s(fused.tasks)

    def backward_s(self, fused: FusedTask, stage: int) -> float:
        """The same, backward; adapters take as long as forward."""
        return self.cost.backward_s(fused.lengths, stage) + adapters_s(fused.tasks)

    def passes_s(self, fused: FusedTask) -> list[float]:
        """Forward and backward of one microbatch, on every stage."""
        lengths, adapters = fused.lengths, adapters_s(fused.tasks)
        stages = range(self.num_stages)
        return [self.cost.forward_s(lengths, s) + self.cost.backward_s(lengths, s) + 2 * adapters for s in stages]

    def latency_s(self, passes_s: Sequence[float]) -> float:
        """End to end of one fused task alone, from its passes on every stage."""
        slowest = max(passes_s)
        return sum(passes_s) - slowest + self.num_microbatches * slowest

    def fits(self, fused: FusedTask) -> bool:
        """True if every stage has room for what it holds in steady state, S − stage microbatches.

        A task that is not fused may need less eager launching than that: one microbatch must fit.
        """
        if self.free_bytes is None:
            return True
        lengths = fused.lengths
        is_lone = len(fused.tasks) == 1
        return all(
            self.cost.held_bytes(lengths, stage) * (1 if is_lone else self.num_stages - stage) <= free
            for stage, free in enumerate(self.free_bytes)
        )


def adapters_s(tasks: Sequence[FuseTask]) -> float:
    """One pass of the adapters of tasks that run side by side."""
    return max(sum(t.adapter_share * t.adapter_s for t in tasks), max(t.adapter_s for t in tasks))


def check_tasks(tasks: Sequence[FuseTask]) -> None:
    """Refuses tasks that cannot be planned, by name."""
    if not tasks:
        raise PlanError("there are no tasks to fuse; give at least one.")
    seen: set[str] = set()
    for task in tasks:
        if task.job in seen:
            raise PlanError("two tasks have this name; use each name once.", where=task.job)
        seen.add(task.job)
        if not task.lengths or min(task.lengths) < 1:
            raise PlanError(
                f"sample lengths are {list(task.lengths)}; use one or more, each at least 1.", where=task.job
            )
        if task.adapter_s < 0 or not 0 <= task.adapter_share <= 1:
            raise PlanError(
                f"adapter_s is {task.adapter_s} and adapter_share {task.adapter_share}; use 0 or more, and 0 to 1.",
                where=task.job,
            )
