"""Replanning: forecasts of the remaining training when jobs come and go, and the decision to change the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft.errors import PlanError
from weft.plan.choose_layout import LayoutChoice, LayoutJob, choose_layout
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.memory import StateBytes
from weft.plan.cost.types import slot_seconds
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.buckets import Buckets, ReplicaModel
from weft.plan.deploy.dispatch import dispatch
from weft.plan.deploy.fleet import Fleet
from weft.plan.deploy.kinds import without_dominated
from weft.plan.deploy.types import DeployJob, KnownLengths, expected_batch
from weft.plan.layout import Layout, ReplicaLayout
from weft.plan.level import PlannedReplicas

__all__ = ["Decision", "Forecaster", "LayoutForecast", "MoveCost", "Prediction", "RemainingJob", "decide"]


MOST_PHASES = 8
"""Maximum number of phases in a forecast; if there are more, neighbouring phases are merged throughout."""


@dataclass(frozen=True)
class RemainingJob:
    name: str
    batch_size: int
    lengths: tuple[int, ...]
    rank: int
    num_steps: int
    is_any_order: bool = False
    """True if its sums do not depend on the order, so that replicas may share its samples."""
    num_parameters: int | None = None
    """Parameters of its adapter; None: those of a LoRA of `rank` on all linears."""
    state: StateBytes = StateBytes()

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def step_tokens(self) -> float:
        return self.batch_size * sum(self.lengths) / len(self.lengths)

    @property
    def to_deploy(self) -> DeployJob:
        return DeployJob(self.name, self.batch_size, KnownLengths(self.lengths), self.is_any_order)


@dataclass(frozen=True)
class Prediction:
    layout: Layout
    step_s: float
    left_s: float
    replicas: PlannedReplicas | None = None
    """Replicas of the layout with the seconds of each; None: as in their cost models."""
    homes: Mapping[str, int] = field(default_factory=dict)
    """Replica that each job is planned on, where one is."""


@dataclass(frozen=True)
class LayoutForecast:
    now: Prediction | None
    """Prediction for the present layout; None if it cannot hold the jobs."""
    planned: Prediction
    step_tokens: float
    longest: int


class Forecaster(Protocol):
    """Predicts the performance of layouts; pure, so that it can run beside training."""

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        """Forecasts the present layout and the best one; PlanError if no layout holds the jobs."""


@dataclass(frozen=True)
class MoveCost:
    save_s: float
    """Seconds to read the state of every job from the old replicas and give it to the new ones."""
    load_s: float

    def __post_init__(self) -> None:
        if self.save_s < 0 or self.load_s < 0:
            raise PlanError(f"moving takes {self.save_s} s to save and {self.load_s} s to load; use 0 or more.")

    @property
    def seconds(self) -> float:
        return self.save_s + self.load_s


Phase = tuple[tuple[RemainingJob, ...], int]


def phases(jobs: Sequence[RemainingJob]) -> list[Phase]:
    """The sets of jobs that train together, until the last job ends."""
    ends = sorted({job.num_steps for job in jobs if job.num_steps > 0})
    every = -(-len(ends) // MOST_PHASES) or 1
    found: list[Phase] = []
    begin = 0
    for end in [*ends[every - 1 :: every], *ends[-1:]]:
        if end > begin:
            found.append((tuple(job for job in jobs if job.num_steps > begin), end - begin))
            begin = end
    return found


@dataclass(frozen=True)
class Decision:
    now: Layout
    forecast: LayoutForecast
    pace: float
    """Real seconds per predicted second."""
    cost: MoveCost

    @property
    def planned(self) -> Layout:
        return self.forecast.planned.layout

    @property
    def gain_s(self) -> float | None:
        """Seconds that the planned layout saves before the cost of moving; None if nothing else is possible."""
        if self.forecast.now is None:
            return None
        return self.pace * (self.forecast.now.left_s - self.forecast.planned.left_s)

    @property
    def moves(self) -> bool:
        if self.planned == self.now:
            return False
        return self.gain_s is None or self.gain_s > self.cost.seconds

    @property
    def reason(self) -> str:
        if self.planned == self.now:
            return "it is still the best for the jobs that are left"
        if self.gain_s is None:
            return f"samples of up to {self.forecast.longest:,} tokens fit on no replica there was"
        cost = f"{self.cost.seconds:,.3g} s"
        if self.moves:
            return f"it saves about {self.gain_s:,.3g} s of what is left, and moving takes {cost}"
        saved = f"would save about {self.gain_s:,.3g} s of what is left" if self.gain_s > 0 else "would save nothing"
        return f"{self.planned} {saved}, and moving takes {cost}"


def decide(now: Layout, forecast: LayoutForecast, pace: float, cost: MoveCost) -> Decision:
    if pace <= 0:
        raise PlanError(f"{pace} seconds go by for a predicted one; more than 0.")
    return Decision(now, forecast, pace, cost)


@dataclass(frozen=True)
class DeviceForecaster:
    cost_for: Callable[[Sequence[RemainingJob]], AnalyticCost]
    capacity: int
    num_devices: int
    memory_bytes: int

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        parts = [(self._choice(own), self._whole_s(own), steps) for own, steps in phases(jobs)]
        planned = _predict_on_devices(parts[0][0].chosen.layout, parts)
        assert planned is not None, "a chosen layout fits, and fewer jobs need no more room"
        tokens = sum(job.step_tokens for job in jobs)
        return LayoutForecast(_predict_on_devices(now, parts), planned, tokens, max(job.longest for job in jobs))

    def _choice(self, jobs: Sequence[RemainingJob]) -> LayoutChoice:
        known = [
            LayoutJob(round(job.step_tokens), job.rank, job.is_any_order, job.num_parameters, job.state) for job in jobs
        ]
        return choose_layout(self.cost_for(jobs), known, self.capacity, self.num_devices, self.memory_bytes)

    def _whole_s(self, jobs: Sequence[RemainingJob]) -> float:
        cost = self.cost_for(jobs)
        return slot_seconds(cost, 1, [self.capacity]) * sum(job.step_tokens for job in jobs) / self.capacity


def _predict_on_devices(layout: Layout, parts: Sequence[tuple[LayoutChoice, float, int]]) -> Prediction | None:
    """The prediction over all phases; None if the layout does not fit."""
    steps: list[tuple[float, int]] = []
    for choice, whole_s, num_steps in parts:
        fitting = (option for option in choice.options if option.device_bytes <= choice.memory_bytes)
        option = next((option for option in fitting if option.layout == layout), None)
        if option is None:
            return None
        steps.append((whole_s / option.speed, num_steps))
    return Prediction(layout, steps[0][0], sum(step_s * num_steps for step_s, num_steps in steps))


BUDGET_S = 2.0
"""Processor seconds of one plan, which is made beside training."""
CLOSE = 0.02
"""Relative difference of time below which the layout with fewer devices is taken."""


@dataclass(frozen=True)
class ClusterForecaster:
    pools: Mapping[str, int]
    kinds_for: Callable[[Sequence[RemainingJob]], Sequence[ReplicaKind]]
    """The kinds of replicas that can be trained, with room for the adapters of these jobs."""

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        kinds = list(self.kinds_for(jobs))
        batch = expected_batch([job.to_deploy for job in jobs])
        problem = DeployProblem(tuple(without_dominated(kinds, batch)), self.pools, batch)
        planned = plan_deployment(problem, budget_s=BUDGET_S).layout
        parts = [_PhaseCosts.of(own, steps, kinds) for own, steps in phases(jobs)]
        layouts = dict.fromkeys([planned, *self._simple_layouts(kinds)])
        found = [prediction for layout in layouts if (prediction := _predict(layout, parts)) is not None]
        soonest = min(prediction.left_s for prediction in found)
        close = [prediction for prediction in found if prediction.left_s <= soonest * (1 + CLOSE)]
        best = min(close, key=lambda prediction: prediction.layout.num_devices)
        tokens = sum(job.step_tokens for job in jobs)
        return LayoutForecast(_predict(now, parts), best, tokens, max(job.longest for job in jobs))

    def _simple_layouts(self, kinds: Iterable[ReplicaKind]) -> list[Layout]:
        """Layouts of one replica of each kind, and of as many as fit."""
        found = []
        for kind in kinds:
            most = self.pools[kind.pool] // kind.num_gpus
            found += [Layout((kind.layout,) * count) for count in (1, most) if count]
        return found


@dataclass(frozen=True)
class _PhaseCosts:
    batch: Buckets
    models: Mapping[ReplicaLayout, ReplicaModel]
    num_steps: int
    at_home: tuple[str, ...]

    @classmethod
    def of(cls, jobs: Sequence[RemainingJob], num_steps: int, kinds: Iterable[ReplicaKind]) -> _PhaseCosts:
        batch = expected_batch([job.to_deploy for job in jobs])
        at_home = tuple(job.name for job in jobs if not job.is_any_order)
        return cls(batch, {kind.layout: kind.model for kind in kinds}, num_steps, at_home)

    def step_s(self, layout: Layout) -> float | None:
        """Seconds of a global batch of every job; None if the layout cannot hold it."""
        if any(replica not in self.models for replica in layout.replicas):
            return None
        models = [self.models[replica] for replica in layout.replicas]
        if max(model.most_tokens for model in models) < self.batch.bounds[-1]:
            return None
        return dispatch(Fleet(models, self.batch)).step_s

    def replicas(self, layout: Layout) -> PlannedReplicas:
        models = [self.models[replica] for replica in layout.replicas]
        return Fleet(models, self.batch).planned(self.at_home)


def _predict(layout: Layout, parts: Sequence[_PhaseCosts]) -> Prediction | None:
    steps = [part.step_s(layout) for part in parts]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps) or not known:
        return None
    left_s = sum(part.num_steps * step for part, step in zip(parts, known, strict=True))
    return Prediction(layout, known[0], left_s, parts[0].replicas(layout))
