"""What unlike replicas save, by the models: nothing here has run on the GPUs it speaks of.

All figures are shares of the GPU-seconds of a step that one way saves against another, means over 20 drawn batches.

gpu_seconds_saving         LobRA's twelve tasks, 70B-like layouts on 64 GPUs, samples padded: planned replicas, balanced
                           dispatch and buckets chosen in every step, against the best alike replicas with even shares
                           and fixed buckets (powers of two from 256 to 16,384)
ablation_length            the same with dispatch by length and fixed buckets
ablation_balanced          with balanced dispatch and fixed buckets
ablation_bucketing         with buckets chosen again as well
ablation                   the least that one of the three adds to what was there before it; above 0, their order is
                           that of the paper
gpu_seconds_saving_bucketed    of the planned replicas where the alike ones choose buckets again too
gpu_seconds_saving_sequential  against one task after another on the best alike replicas for each
gpu_seconds_saving_lobra_sequential   the same on the best unlike replicas for each
gpu_seconds_saving_table_8     the same on the unlike replicas that the paper used for each (its Table 8)
sequential_saving          of one task after another on unlike replicas against alike ones; 0.353 in the paper's Table 6
gpu_seconds_saving_packed  as the first, with samples packed and not padded on both sides
gpu_seconds_saving_packed_weft   as that, with the memory that Weft's own step needs instead of what is assumed of
                           LobRA's: layouts hold longer samples, and fewer GPUs are needed for the longest
saving_7b_…                the ablation of the paper's six tasks with Llama2-7B on 16 A100-40G, from its measured tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

from benchmarks.deploy.published import (
    GPUS_PER_MACHINE,
    LONGEST,
    SIX,
    TABLE_8,
    a800,
    published_jobs,
    replicas_7b,
    replicas_70b,
    shape_70b,
)
from weft.plan.cost.analytic import BackboneSetup
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.buckets import ReplicaModel
from weft.plan.deploy.dispatch import dispatch, dispatch_by_length, dispatch_evenly
from weft.plan.deploy.kinds import GpuPool, kinds_on, without_dominated
from weft.plan.deploy.planner import alike_plans, plan_each
from weft.plan.deploy.types import DeployJob, draw_batches, expected_batch
from weft.plan.simulate.deploy_forecast import in_turn_step_s, mean_step_s

NUM_STEPS = 20
NUM_GPUS = 64
FIXED_BOUNDS = tuple(256 << power for power in range(7))
SEQUENTIAL_BUDGET_S = 3.0


def measure_savings(num_steps: int = NUM_STEPS) -> dict[str, float]:
    """Keys as in `python -m benchmarks deploy --json`."""
    padded = Comparison(published_jobs(), replicas_70b(NUM_GPUS), NUM_GPUS, num_steps)
    packed = Comparison(published_jobs(), replicas_70b(NUM_GPUS, is_packed=True), NUM_GPUS, num_steps)
    own = Comparison(published_jobs(), _weft_replicas(), NUM_GPUS, num_steps)
    ablation = padded.ablation()
    planned_s = mean_step_s(padded.planned, padded.batches)
    in_turn = {
        "sequential": padded.in_turn_s(num_steps, are_alike=True),
        "lobra_sequential": padded.in_turn_s(num_steps, are_alike=False),
        "table_8": padded.published_in_turn_s(num_steps),
    }
    return {
        "gpu_seconds_saving": ablation[-1],
        "gpu_seconds_saving_bucketed": padded.saving(),
        **{f"gpu_seconds_saving_{name}": 1 - planned_s / seconds for name, seconds in in_turn.items()},
        "sequential_saving": 1 - in_turn["lobra_sequential"] / in_turn["sequential"],
        "gpu_seconds_saving_packed": packed.saving(),
        "gpu_seconds_saving_packed_weft": own.saving(),
        **_named(ablation, "ablation"),
        "ablation": min(after - before for before, after in zip([0.0, *ablation], ablation, strict=False)),
    }


def measure_7b(num_steps: int = NUM_STEPS) -> dict[str, float]:
    """Keys as in `python -m benchmarks deploy --json`."""
    return _named(Comparison(published_jobs(SIX), replicas_7b(), 16, num_steps).ablation(), "saving_7b")


def _named(ablation: Sequence[float], name: str) -> dict[str, float]:
    return {f"{name}_{part}": share for part, share in zip(("length", "balanced", "bucketing"), ablation, strict=True)}


class Comparison:
    """One workload on planned replicas and on the best alike ones."""

    def __init__(
        self, jobs: Sequence[DeployJob], models: Sequence[ReplicaModel], num_gpus: int, num_steps: int
    ) -> None:
        self.jobs, self.pools = jobs, {"gpus": num_gpus}
        self.kinds = [ReplicaKind(model) for model in models]
        batch = expected_batch(jobs)
        chosen = DeployProblem(tuple(without_dominated(self.kinds, batch)), self.pools, batch)
        everything = DeployProblem(tuple(self.kinds), self.pools, batch)
        self.planned = chosen.models(plan_deployment(chosen).counts)
        self.alike = [everything.models(plan.counts) for plan in alike_plans(everything)]
        self.batches = draw_batches(jobs, num_steps, seed=1)

    def on(self, replicas: Mapping[tuple[int, int], int]) -> Comparison:
        """The same workload on given replicas, by (tensor parallel, stages), in place of the planned ones."""
        known = {(kind.layout.tensor, kind.layout.stages): kind.model for kind in self.kinds}
        other = copy(self)
        other.planned = [known[layout] for layout, count in replicas.items() for _ in range(count)]
        return other

    def in_turn_s(self, num_steps: int, *, are_alike: bool) -> float:
        """Of one job after another, each on the best replicas for it."""
        plans = plan_each(self.kinds, self.pools, self.jobs, are_alike=are_alike, budget_s=SEQUENTIAL_BUDGET_S)
        return in_turn_step_s(plans, self.jobs, num_steps, 1, dispatch_evenly if are_alike else dispatch)

    def published_in_turn_s(self, num_steps: int) -> float:
        """The same on the replicas that the paper used for each."""
        return sum(
            mean_step_s(self.on(TABLE_8[job.name]).planned, draw_batches([job], num_steps, seed=1)) for job in self.jobs
        )

    def saving(self) -> float:
        """Of planned replicas, where both sides choose buckets again."""
        return 1 - mean_step_s(self.planned, self.batches) / self.alike_s()

    def alike_s(self, bounds: Sequence[int] | None = None) -> float:
        """Of the alike replicas that are fastest on these very batches."""
        return min(mean_step_s(models, self.batches, dispatch_evenly, bounds) for models in self.alike)

    def ablation(self) -> list[float]:
        """By length, balanced, and with buckets chosen again, against alike replicas with fixed buckets."""
        fused_s = self.alike_s(FIXED_BOUNDS)
        steps = (
            mean_step_s(self.planned, self.batches, dispatch_by_length, FIXED_BOUNDS),
            mean_step_s(self.planned, self.batches, dispatch, FIXED_BOUNDS),
            mean_step_s(self.planned, self.batches),
        )
        return [1 - step_s / fused_s for step_s in steps]


def _weft_replicas() -> list[ReplicaModel]:
    """The same layouts with the memory of Weft's own step."""
    machines = NUM_GPUS // GPUS_PER_MACHINE
    hardware = a800(1)
    pool = GpuPool("gpus", hardware, GPUS_PER_MACHINE, machines, a800(2 * GPUS_PER_MACHINE).link_rate)
    setup = BackboneSetup(shape_70b(), ranks=(16,) * len(published_jobs()))
    return [kind.model for kind in kinds_on(pool, setup, LONGEST)]
