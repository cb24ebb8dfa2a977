"""Forecast of a cluster's deployment: the planned replicas, compared with other ways to deploy.

Every figure is predicted. Steps are means over drawn batches, each put into buckets and dispatched by itself. A plan is
searched for one expected batch, in which rare long samples count as if they came in every step; so of the best plans
for it, and of alike replicas, the one is chosen that is fastest over the drawn batches.

Not counted: planning of a step, which needs only sample lengths and overlaps the step before, and the sum of the
adapters' gradients over replicas, which takes a few thousandths of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.plan.deploy import Deployment, DeployProblem, ReplicaKind
from weft.plan.deploy.buckets import ReplicaModel
from weft.plan.deploy.dispatch import dispatch, dispatch_by_length, dispatch_evenly
from weft.plan.deploy.fleet import Dispatch, Fleet
from weft.plan.deploy.kinds import without_dominated
from weft.plan.deploy.planner import alike_plans, best_deployments, plan_each, without_idle
from weft.plan.deploy.types import DeployJob, draw_batches, expected_batch, in_buckets
from weft.plan.level import PlannedReplicas


def mean_step_s(
    models: Sequence[ReplicaModel],
    batches: Sequence[Sequence[int]],
    share: Callable[[Fleet], Dispatch] = dispatch,
    bounds: Sequence[int] | None = None,
    jobs: Sequence[DeployJob] = (),
    homes: Sequence[int] | None = None,
) -> float:
    """Mean seconds of a step over batches of sample lengths. `bounds`: fixed buckets; None: chosen per batch. `jobs`:
    the jobs of the batches; without them all samples are divisible. `homes`: home replicas of the jobs that have
    one."""
    steps = [share(Fleet(models, in_buckets(jobs, lengths, bounds), homes)).step_s for lengths in batches]
    return statistics.mean(steps)


def in_turn_step_s(
    plans: Sequence[Deployment],
    jobs: Sequence[DeployJob],
    num_batches: int,
    seed: int,
    share: Callable[[Fleet], Dispatch] = dispatch,
) -> float:
    """Mean seconds of a step of every job, one job after another, each on its own plan and on drawn batches. A plan's
    own step does not show this: its expected batch has rounded-up buckets, which distorts small batches most."""
    return sum(
        mean_step_s(plan.models, draw_batches([job], num_batches, seed), share, jobs=[job], homes=plan.homes)
        for plan, job in zip(plans, jobs, strict=True)
    )


NUM_BATCHES = 8
PLANNED_SEED, FORECAST_SEED = 0, 1
FINALISTS = 8
"""Plans, the best for the expected batch, that are compared over drawn ones; LobRA keeps at least as many."""
SEQUENTIAL_BUDGET_S = 1.0


@dataclass(frozen=True)
class DeployChoice:
    name: str
    plan: str
    """Replicas of the choice, in words, or the number of plans for one job after another."""
    step_s: float
    gpu_seconds: float


@dataclass(frozen=True)
class DeployForecast:
    deployment: Deployment
    choices: tuple[DeployChoice, ...]
    """The planned replicas first, then the alternatives."""
    shared: Dispatch
    bounds: tuple[int, ...]
    replicas: PlannedReplicas
    step_tokens: float
    """Mean tokens of a global batch of every job."""

    @property
    def planned(self) -> DeployChoice:
        return self.choices[0]

    def to_json(self) -> dict[str, Any]:
        plan = self.deployment
        replicas = [
            {
                "pool": kind.pool,
                "layout": str(kind.layout),
                "gpus": kind.num_gpus,
                "most_tokens": kind.model.most_tokens,
                "samples": list(own),
                "seconds": seconds,
            }
            for kind, own, seconds in zip(plan.replicas, self.shared.counts, self.shared.seconds, strict=True)
        ]
        return {
            "predicted": True,
            "plan": str(plan),
            "gpus": dict(plan.problem.pools),
            "gpus_used": plan.gpus_used,
            "gap": plan.gap,
            "is_complete": plan.is_complete,
            "num_plans": plan.num_plans,
            "bounds": list(self.bounds),
            "replicas": replicas,
            "homes": self.replicas.homes,
            "choices": [vars(choice) for choice in self.choices],
        }


def forecast_deployment(
    kinds: Sequence[ReplicaKind], pools: Mapping[str, int], jobs: Sequence[DeployJob]
) -> DeployForecast:
    batch = expected_batch(jobs, PLANNED_SEED)
    everything = DeployProblem(tuple(kinds), pools, batch)
    problem = DeployProblem(tuple(without_dominated(kinds, batch)), pools, batch)
    batches = draw_batches(jobs, NUM_BATCHES, FORECAST_SEED)
    num_gpus = problem.num_gpus

    def mean_s(plan: Deployment, share: Callable[[Fleet], Dispatch] = dispatch) -> float:
        return mean_step_s(plan.models, batches, share, jobs=jobs, homes=plan.homes)

    def choice(name: str, plan: str, step_s: float) -> DeployChoice:
        return DeployChoice(name, plan, step_s, num_gpus * step_s)

    alike = alike_plans(everything)
    searched = best_deployments(problem, FINALISTS)
    finalists = [*searched, *(_balanced(plan, searched[0]) for plan in alike)]
    planned_s, index = min((mean_s(plan), index) for index, plan in enumerate(finalists))
    deployment = finalists[index]
    choices = [
        choice("planned", str(deployment), planned_s),
        choice("by length", str(deployment), mean_s(deployment, dispatch_by_length)),
    ]
    if deployment.homes:
        freed = expected_batch([replace(job, is_any_order=True) for job in jobs], PLANNED_SEED)
        (best,) = best_deployments(DeployProblem(tuple(without_dominated(kinds, freed)), pools, freed), 1)
        choices.append(choice("any order", str(best), mean_step_s(best.models, batches)))
    even = [choice("alike", str(plan), mean_s(plan, dispatch_evenly)) for plan in alike]
    choices.append(min(even, key=lambda found: found.step_s))
    for name, are_alike in (("in turn, alike", True), ("in turn, planned", False)):
        plans = plan_each(kinds, pools, jobs, are_alike=are_alike, budget_s=SEQUENTIAL_BUDGET_S)
        share = dispatch_evenly if are_alike else dispatch
        step_s = in_turn_step_s(plans, jobs, NUM_BATCHES, FORECAST_SEED, share)
        choices.append(choice(name, f"a plan for each of {len(plans)} jobs", step_s))
    buckets = in_buckets(jobs, batches[0])
    shared = dispatch(Fleet(deployment.models, buckets, deployment.homes))
    replicas = deployment.planned_replicas(job.name for job in jobs if not job.is_any_order)
    step_tokens = statistics.mean(sum(batch) for batch in batches)
    return DeployForecast(deployment, tuple(choices), shared, buckets.bounds, replicas, step_tokens)


def _balanced(plan: Deployment, searched: Deployment) -> Deployment:
    """Alike replicas with balanced dispatch of the expected batch; bounds of the search apply."""
    counts, shared = without_idle(plan.problem, plan.counts, dispatch(Fleet(plan.models, plan.problem.buckets)))
    return replace(searched, problem=plan.problem, counts=counts, dispatch=shared)
