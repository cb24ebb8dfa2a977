"""Steps of a deployment on predicted seconds: batch after batch is bucketed and shared out over the replicas.

Planning of a step needs only the lengths of its samples, so it goes on beside the step before; it is not counted here.
Nor is the sum of the adapters' gradients over replicas, which is a few thousandths of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from weft.plan.deploy import Deployment
from weft.plan.deploy.workload import DeployJob, draw_batches, in_buckets
from weft.plan.dispatch import Dispatch, Fleet, ReplicaModel, dispatch


def mean_step_s(
    models: Sequence[ReplicaModel],
    batches: Sequence[Sequence[int]],
    share: Callable[[Fleet], Dispatch] = dispatch,
    bounds: Sequence[int] | None = None,
    jobs: Sequence[DeployJob] = (),
    homes: Sequence[int] | None = None,
) -> float:
    """Mean seconds of a step over batches of sample lengths; with bounds, buckets are those and not chosen anew.

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
