"""What a cluster would make of its jobs: the planned replicas, and beside them what others would deploy.

Every figure is predicted. Steps are means over drawn batches, each bucketed and shared out anew. A plan is searched for
one expected batch, whose rare long samples count as if they came in every step; so of the best plans for that, and of
alike replicas, the one is taken that is fastest over the drawn batches.

Steps of a deployment on predicted seconds: batch after batch is bucketed and shared out over the replicas.

Planning of a step needs only the lengths of its samples, so it goes on beside the step before; it is not counted here.
Nor is the sum of the adapters' gradients over replicas, which is a few thousandths of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.plan.deploy import Deployment, DeployProblem, ReplicaKind
from weft.plan.deploy.kinds import without_dominated
from weft.plan.deploy.planner import alike_plans, best_deployments, plan_each, without_idle
from weft.plan.deploy.workload import DeployJob, draw_batches, expected_batch, in_buckets
from weft.plan.dispatch import Dispatch, Fleet, ReplicaModel, dispatch, dispatch_by_length, dispatch_evenly
from weft.plan.homes import PlannedReplicas


def mean_step_s(
    models: Sequence[ReplicaModel],
    batches: Sequence[Sequence[int]],
    share: Callable[[Fleet], Dispatch] = dispatch,
    bounds: Sequence[int] | None = None,
    jobs: Sequence[DeployJob] = (),
    homes: Sequence[int] | None = None,
) -> float:
    """Mean seconds of a step over batches of sample lengths; with bounds, buckets are those and are not chosen again.

    `jobs`: whose batches they are; without, all samples may be shared out. `homes`: where those are that have one.
    """
    steps = [share(Fleet.of(models, in_buckets(jobs, lengths, bounds), homes)).step_s for lengths in batches]
    return statistics.mean(steps)


def in_turn_step_s(
    plans: Sequence[Deployment],
    jobs: Sequence[DeployJob],
    num_batches: int,
    seed: int,
    share: Callable[[Fleet], Dispatch] = dispatch,
) -> float:
    """Mean seconds of a step of every job, one job after another, each on its own plan and on drawn batches.

    A plan's own step is that of an expected batch whose buckets are rounded up, which weighs on small batches most: it
    is not what a job takes.
    """
    return sum(
        mean_step_s(plan.models, draw_batches([job], num_batches, seed), share, jobs=[job], homes=plan.homes)
        for plan, job in zip(plans, jobs, strict=True)
    )


NUM_BATCHES = 8
PLANNED_SEED, FORECAST_SEED = 0, 1
FINALISTS = 8
"""Plans, the best for the expected batch, that are compared over drawn ones; LobRA keeps at least as many."""
SEQUENTIAL_BUDGET_S = 1.0
"""For the plan of each job by itself."""


@dataclass(frozen=True)
class DeployChoice:
    """One way of running all jobs for a step."""

    name: str
    plan: str
    """Its replicas; of one job after another, how many plans."""
    step_s: float
    gpu_seconds: float


@dataclass(frozen=True)
class DeployForecast:
    """A planned cluster."""

    deployment: Deployment
    choices: tuple[DeployChoice, ...]
    """The planned replicas first, then those it is compared with."""
    shared: Dispatch
    """How the first drawn batch is shared out."""
    bounds: tuple[int, ...]
    """Its buckets."""
    replicas: PlannedReplicas
    """What a run that executes the plan is told."""

    @property
    def planned(self) -> DeployChoice:
        """The planned replicas."""
        return self.choices[0]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
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
    """Plans replicas for jobs, and what they are compared with."""
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
    planned_s, place = min((mean_s(plan), place) for place, plan in enumerate(finalists))
    deployment = finalists[place]
    choices = [
        choice("planned", str(deployment), planned_s),
        choice("by length", str(deployment), mean_s(deployment, dispatch_by_length)),
    ]
    even = [choice("alike", str(plan), mean_s(plan, dispatch_evenly)) for plan in alike]
    choices.append(min(even, key=lambda found: found.step_s))
    for name, are_alike in (("in turn, alike", True), ("in turn, planned", False)):
        plans = plan_each(kinds, pools, jobs, are_alike=are_alike, budget_s=SEQUENTIAL_BUDGET_S)
        share = dispatch_evenly if are_alike else dispatch
        step_s = in_turn_step_s(plans, jobs, NUM_BATCHES, FORECAST_SEED, share)
        choices.append(choice(name, f"a plan for each of {len(plans)} jobs", step_s))
    buckets = in_buckets(jobs, batches[0])
    shared = dispatch(Fleet.of(deployment.models, buckets, deployment.homes))
    told = deployment.planned_replicas(job.name for job in jobs if not job.is_any_order)
    return DeployForecast(deployment, tuple(choices), shared, buckets.bounds, told)


def _balanced(plan: Deployment, searched: Deployment) -> Deployment:
    """Alike replicas, the expected batch shared out as planned ones do; what a search found of all plans holds."""
    counts, shared = without_idle(plan.problem, plan.counts, dispatch(Fleet.of(plan.models, plan.problem.buckets)))
    return replace(searched, problem=plan.problem, counts=counts, dispatch=shared)
