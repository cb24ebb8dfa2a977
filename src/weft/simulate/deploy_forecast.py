"""What a cluster would make of its jobs: the planned replicas, and beside them what others would deploy.

Every figure is predicted. Steps are means over drawn batches, each bucketed and shared out anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.plan.bucket import choose_buckets
from weft.plan.deploy import Deployment, DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.baselines import alike_plans, plan_each
from weft.plan.deploy.candidates import without_dominated
from weft.plan.deploy.expected import expected_batch
from weft.plan.deploy.workload import DeployJob, draw_batches
from weft.plan.dispatch import Dispatch, Fleet, dispatch, dispatch_by_length, dispatch_evenly
from weft.simulate.deployed import in_turn_step_s, mean_step_s

NUM_BATCHES = 8
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
                "tensor_parallel": kind.layout.tensor_parallel,
                "num_stages": kind.layout.num_stages,
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
            "choices": [vars(choice) for choice in self.choices],
        }


def forecast_deployment(
    kinds: Sequence[ReplicaKind], pools: Mapping[str, int], jobs: Sequence[DeployJob], *, seed: int = 0
) -> DeployForecast:
    """Plans replicas for jobs, and what they are compared with."""
    batch = expected_batch(jobs, seed)
    everything = DeployProblem(tuple(kinds), pools, batch)
    problem = DeployProblem(tuple(without_dominated(kinds, batch)), pools, batch)
    deployment = plan_deployment(problem)
    batches = draw_batches(jobs, NUM_BATCHES, seed + 1)
    models = problem.models(deployment.counts)
    num_gpus = problem.num_gpus

    def choice(name: str, plan: str, step_s: float) -> DeployChoice:
        return DeployChoice(name, plan, step_s, num_gpus * step_s)

    choices = [
        choice("planned", str(deployment), mean_step_s(models, batches)),
        choice("by length", str(deployment), mean_step_s(models, batches, dispatch_by_length)),
    ]
    alike = [
        choice("alike", str(plan), mean_step_s(everything.models(plan.counts), batches, dispatch_evenly))
        for plan in alike_plans(everything)
    ]
    choices.append(min(alike, key=lambda found: found.step_s))
    for name, are_alike in (("in turn, alike", True), ("in turn, planned", False)):
        plans = plan_each(kinds, pools, jobs, are_alike=are_alike, budget_s=SEQUENTIAL_BUDGET_S)
        share = dispatch_evenly if are_alike else dispatch
        step_s = in_turn_step_s(plans, jobs, NUM_BATCHES, seed + 1, share)
        choices.append(choice(name, f"a plan for each of {len(plans)} jobs", step_s))
    buckets = choose_buckets(batches[0])
    shared = dispatch(Fleet.of(models, buckets))
    return DeployForecast(deployment, tuple(choices), shared, buckets.bounds)
