"""Forecasts for a cluster that was planned by `weft plan deploy`.

A step on given replicas takes as long as the balanced dispatch of the expected batch. The planner looks at the jobs of
now; what is left is trained phase by phase as they end, so besides its plan alike replicas and single ones are looked
at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.plan.bucket import Buckets
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.kinds import without_dominated
from weft.plan.deploy.workload import expected_batch
from weft.plan.dispatch import Fleet, ReplicaModel, dispatch
from weft.plan.homes import PlannedReplicas
from weft.plan.layout import Layout, ReplicaLayout
from weft.plan.replan.types import LayoutForecast, Prediction, RemainingJob, phases

BUDGET_S = 2.0
"""Processor time of one plan: it is made beside training."""
CLOSE = 0.02
"""Part of the time below which the layout of fewer devices is taken."""


@dataclass(frozen=True)
class ClusterForecaster:
    """What replicas on the devices of one cluster make of jobs."""

    pools: Mapping[str, int]
    """Devices by pool."""
    kinds_for: Callable[[Sequence[RemainingJob]], Sequence[ReplicaKind]]
    """The kinds of replicas that can be trained, with room for the adapters of these jobs."""

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        """The layout of now and the best one; PlanError if no layout holds the jobs."""
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
        """One replica of each kind, and as many as there are devices for."""
        found = []
        for kind in kinds:
            most = self.pools[kind.pool] // kind.num_gpus
            found += [Layout((kind.layout,) * count) for count in (1, most) if count]
        return found


@dataclass(frozen=True)
class _PhaseCosts:
    """The jobs of a phase, as replicas see them."""

    batch: Buckets
    models: Mapping[ReplicaLayout, ReplicaModel]
    num_steps: int
    at_home: tuple[str, ...]
    """The jobs that have one home."""

    @classmethod
    def of(cls, jobs: Sequence[RemainingJob], num_steps: int, kinds: Iterable[ReplicaKind]) -> _PhaseCosts:
        """The costs of these jobs for so many steps."""
        batch = expected_batch([job.to_deploy for job in jobs])
        at_home = tuple(job.name for job in jobs if not job.is_any_order)
        return cls(batch, {kind.layout: kind.model for kind in kinds}, num_steps, at_home)

    def step_s(self, layout: Layout) -> float | None:
        """A global batch of every job; None if it cannot be held."""
        if any(replica not in self.models for replica in layout.replicas):
            return None
        models = [self.models[replica] for replica in layout.replicas]
        if max(model.most_tokens for model in models) < self.batch.bounds[-1]:
            return None
        return dispatch(Fleet.of(models, self.batch)).step_s

    def replicas(self, layout: Layout) -> PlannedReplicas:
        """What a run in a layout that holds the jobs has to know of it."""
        models = [self.models[replica] for replica in layout.replicas]
        return Fleet.of(models, self.batch).planned(self.at_home)


def _predict(layout: Layout, parts: Sequence[_PhaseCosts]) -> Prediction | None:
    steps = [part.step_s(layout) for part in parts]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps) or not known:
        return None
    left_s = sum(part.num_steps * step for part, step in zip(parts, known, strict=True))
    return Prediction(layout, known[0], left_s, parts[0].replicas(layout))
