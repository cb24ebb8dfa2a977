"""Layouts of a sweep from its packs: each replica has the stages that the planner gives the packs that begin on it.

When trials end, what is left is planned again: once there are fewer packs than devices, replicas in stages take their
place where that ends sooner. A plan ends with its last pack, whereas `plan/choose_layout` compares rates of whole runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.layout import Layout, ReplicaLayout
from weft.plan.replan import LayoutForecast, Prediction, RemainingJob
from weft.plan.sweep.planner import plan_sweep
from weft.plan.sweep.types import Configuration, Pack, SweepPlan


def can_be_packs(layout: Layout, jobs: Sequence[RemainingJob]) -> bool:
    """True if a plan can have these replicas, and each job trains on one of them."""
    is_in_stages = all(replica.num_devices == replica.stages for replica in layout.replicas)
    return is_in_stages and not any(job.is_any_order for job in jobs)


@dataclass(frozen=True)
class PackForecaster:
    cost: AnalyticCost
    """Of the backbone on one device."""
    capacity: int
    num_devices: int

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        tokens = sum(job.step_tokens for job in jobs)
        planned = _prediction(self._plan(jobs), tokens)
        try:
            present = _prediction(self._plan(jobs, [replica.stages for replica in now.replicas]), tokens, now)
        except PlanError:
            present = None
        if present is not None and present.left_s <= planned.left_s:
            planned = present
        return LayoutForecast(present, planned, tokens, max(job.longest for job in jobs))

    def _plan(self, jobs: Sequence[RemainingJob], groups: Sequence[int] | None = None) -> SweepPlan:
        return plan_sweep(
            [_configuration(job) for job in jobs],
            self.cost.shape,
            self.cost.hardware,
            self.num_devices,
            quantize=self.cost.quantize,
            recompute=self.cost.recompute,
            capacity=self.capacity,
            plain_row_bytes=self.cost.plain_row_bytes,
            in_stages=True,
            groups=groups,
        )


def _configuration(job: RemainingJob) -> Configuration:
    return Configuration(
        job.name,
        job.rank,
        job.batch_size,
        job.num_steps,
        max(1, round(job.step_tokens / job.batch_size)),
        job.longest,
        num_parameters=job.num_parameters,
    )


def _prediction(plan: SweepPlan, step_tokens: float, layout: Layout | None = None) -> Prediction:
    """`layout`: the one that was planned for, of which a replica may have no pack; None: the plan's own."""
    if layout is None:
        groups = _groups(plan.packs)
        layout = Layout(tuple(ReplicaLayout(stages=len(gpus)) for gpus in groups))
    else:
        ends = itertools.accumulate((replica.stages for replica in layout.replicas), initial=0)
        groups = [tuple(range(*own)) for own in itertools.pairwise(ends)]
    there = [pack for pack in plan.packs if pack.gpus in groups]
    homes = {name: groups.index(pack.gpus) for pack in there for name in pack.configurations}
    # On average over all that is left, also while some replicas have nothing more to do.
    step_s = plan.makespan_s * step_tokens / plan.num_tokens
    return Prediction(layout, step_s, plan.makespan_s, homes=homes)


def _groups(packs: Sequence[Pack]) -> list[tuple[int, ...]]:
    """Groups of GPUs as they are at first, the largest first: later packs find room on them."""
    found: list[tuple[int, ...]] = []
    for pack in packs:
        if not any(set(pack.gpus) & set(gpus) for gpus in found):
            found.append(pack.gpus)
    return sorted(found, key=lambda gpus: (-len(gpus), gpus))
