"""Deployments that others use: alike replicas for all jobs at once (Task-Fused), and one job after another.

Task-Sequential runs each job by itself on the best alike replicas for it, LobRA-Sequential on the best unlike ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.plan.deploy import partitions
from weft.plan.deploy.expected import expected_batch
from weft.plan.deploy.planner import BUDGET_S, plan_deployment
from weft.plan.deploy.types import Deployment, DeployProblem, ReplicaKind
from weft.plan.deploy.workload import DeployJob
from weft.plan.dispatch import Fleet, dispatch_evenly


def plan_alike(problem: DeployProblem) -> Deployment:
    """The best plan of replicas of one layout for the expected batch, which is shared out evenly."""
    plans = alike_plans(problem)
    best = min(plans, key=lambda plan: plan.step_s)
    return replace(best, num_plans=float(len(plans)), num_tried=len(plans), is_complete=True)


def alike_plans(problem: DeployProblem) -> list[Deployment]:
    """A plan for every layout that holds all samples by itself."""
    found = []
    for counts in partitions.alike_plans(problem):
        shared = dispatch_evenly(Fleet.of(problem.models(counts), problem.buckets))
        found.append(Deployment(problem, counts, shared, shared.bound_s, 1.0, 1))
    return found


def plan_each(
    kinds: Sequence[ReplicaKind],
    pools: Mapping[str, int],
    jobs: Sequence[DeployJob],
    *,
    are_alike: bool,
    budget_s: float = BUDGET_S,
) -> list[Deployment]:
    """A plan of its own for every job, to be run one after another on all GPUs, within a budget for each."""
    problems = [DeployProblem(tuple(kinds), pools, expected_batch([job])) for job in jobs]
    return [plan_alike(own) if are_alike else plan_deployment(own, budget_s=budget_s) for own in problems]
