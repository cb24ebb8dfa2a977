"""What the engine needs of a planner, with the defaults of one that plans at once and learns nothing."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft.plan.cost.learned import PairPace, PassCosts, StagePace
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.orders import Pipe
from weft.plan.program import Program
from weft.plan.types import JobQueue, Limits, Microbatch

PreviousMicrobatches = tuple[tuple[Microbatch, ...], ...]
"""Last microbatches of the program that the next one is appended to, by replica; empty when all are idle."""


class PlanFunction(Protocol):
    """Turns queues into the next program; deterministic. Every `Planner` is one, and so is a plain function."""

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program; empty only if the queues are."""


@dataclass(frozen=True)
class HomeLoad:
    step_tokens: float
    longest: int
    """Tokens of the job's longest sample, or of the longest group that shares a microbatch."""


@dataclass(frozen=True)
class PairChoice:
    """The decision whether microbatches run side by side on devices that share every layer."""

    num_pairs: int = 0
    gain: float | None = None
    """Predicted share of the time that pairs save, or would; None if no two microbatches can be a pair."""


@dataclass(frozen=True)
class PipelineChoice:
    """The program chosen for replicas of several stages, and the predicted gain of grouping its jobs."""

    program: Program
    groups: tuple[tuple[str, ...], ...]
    """Jobs that share microbatches; one group has all of them."""
    fills: tuple[int, ...]
    """Tokens that a microbatch of each group is filled up to."""
    seconds: float
    one_group_s: float
    """Simulated time of the fastest program in which all jobs may share microbatches."""
    several_groups_s: float | None
    """Simulated time of the fastest program with several groups; None if no such program was tried."""
    num_replicas: int = 1
    """Replicas on which jobs were grouped; each has groups of its own."""
    pairs: PairChoice | None = None
    """Decision about microbatches side by side; None where they are not possible."""


@dataclass(frozen=True)
class MeasuredPasses:
    stages: StagePace = field(default_factory=StagePace)
    pairs: PairPace = field(default_factory=PairPace)
    ranks: Mapping[str, int] = field(default_factory=dict)
    has_pairs: bool = False
    """True if microbatches of the last program ran side by side."""
    num_changes: int = 0
    """Number of times that `has_pairs` has changed."""


class Planner(abc.ABC):
    """Turns queues into the next program; deterministic."""

    has_budget = False
    """True if `within` limits the search to the given budget; otherwise the number of seconds is ignored."""
    num_measured = 0
    """Measured passes that the planner's costs rest on; 0 if they come from a table."""

    @abc.abstractmethod
    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program: ...

    @property
    def quick(self) -> Planner:
        return self

    @property
    def can_be_replaced(self) -> bool:
        """True if `quick` plans in its place when it fails or breaks a rule; otherwise the run ends with the error."""
        return self.quick is not self

    def within(self, budget_s: float) -> Planner:
        """The same planner with at most so many seconds for searching."""
        return self.quick if self.can_be_replaced else self

    def informed(self, measured: MeasuredPasses, previous: PreviousMicrobatches) -> Planner:
        """The same planner with measured costs, for a program that is appended to `previous`."""
        return self

    def choose(self, queues: Sequence[JobQueue], limits: Limits) -> PipelineChoice | None:
        """The next program with what was weighed for it; None if there was nothing to choose."""
        return None

    def home_seconds(self, jobs: Mapping[str, HomeLoad], capacity: int) -> Mapping[str, Sequence[float]]:
        """Seconds that a global batch of each job takes on each replica; empty with a single replica."""
        return {}

    def open_pipes(self, limits: Limits) -> list[Pipe]:
        """An empty pipeline per replica, if programs can be appended without draining them; otherwise no pipeline."""
        return []

    @property
    def pass_costs(self) -> Sequence[PassCosts]:
        """Expected costs of forward and backward passes per replica, to time programs appended to others."""
        return [(LinearCost(), None)]
