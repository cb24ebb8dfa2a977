"""What is known of the jobs that are left, and what layouts are predicted to make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.errors import PlanError
from weft.plan.deploy.workload import DeployJob, KnownLengths
from weft.plan.homes import PlannedReplicas
from weft.plan.layout import Layout

MOST_PHASES = 8
"""Phases that are forecast one by one; of more, neighbours count as one."""


@dataclass(frozen=True)
class RemainingJob:
    """A job as far as it is still to be trained."""

    name: str
    batch_size: int
    lengths: tuple[int, ...]
    """Of its samples."""
    rank: int
    num_steps: int
    """That are left."""
    is_any_order: bool = False
    """Its sums do not depend on any order, so that replicas may share its samples."""

    @property
    def longest(self) -> int:
        """Tokens of its longest sample."""
        return max(self.lengths)

    @property
    def step_tokens(self) -> float:
        """Tokens of a global batch, on average."""
        return self.batch_size * sum(self.lengths) / len(self.lengths)

    @property
    def to_deploy(self) -> DeployJob:
        """The same for a planner of deployments."""
        return DeployJob(self.name, self.batch_size, KnownLengths(self.lengths), self.is_any_order)


@dataclass(frozen=True)
class Prediction:
    """What a layout makes of the jobs that are left, in predicted seconds."""

    layout: Layout
    step_s: float
    """A global batch of every job."""
    left_s: float
    """All that is left."""
    replicas: PlannedReplicas | None = None
    """What is known of its replicas, one by one; None: what their cost models say."""


@dataclass(frozen=True)
class LayoutForecast:
    """The layout of now and the best one, for the jobs that are left."""

    now: Prediction | None
    """None: the layout of now cannot hold them."""
    planned: Prediction
    step_tokens: float
    """Tokens of a global batch of every job."""
    longest: int
    """Tokens of the longest sample."""


class Forecaster(Protocol):
    """Predicts what layouts make of jobs; pure, so that it can run beside training."""

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        """The layout of now and the best one; PlanError if no layout holds the jobs."""
        ...


@dataclass(frozen=True)
class MoveCost:
    """What training stands still for while a run changes its layout, in measured seconds."""

    save_s: float
    """The state of every job read from the old replicas and given to the new ones."""
    load_s: float
    """Replicas opened, with their backbones loaded."""

    def __post_init__(self) -> None:
        if self.save_s < 0 or self.load_s < 0:
            raise PlanError(f"moving takes {self.save_s} s to save and {self.load_s} s to load; use 0 or more.")

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.save_s + self.load_s


Phase = tuple[tuple[RemainingJob, ...], int]
"""Jobs that train together, and for how many steps."""


def phases(jobs: Sequence[RemainingJob]) -> list[Phase]:
    """Who trains together for how long, until the last job ends."""
    ends = sorted({job.num_steps for job in jobs if job.num_steps > 0})
    every = -(-len(ends) // MOST_PHASES) or 1
    found: list[Phase] = []
    begin = 0
    for end in [*ends[every - 1 :: every], *ends[-1:]]:
        if end > begin:
            found.append((tuple(job for job in jobs if job.num_steps > begin), end - begin))
            begin = end
    return found
