"""All that `python -m benchmarks deploy` measures. Plans and dispatch are timed here; what they save is predicted.

plan64_s, plan256_s, plan1024_s   processor seconds, to which other programs add nothing, for Llama-70B-like layouts on
                                  so many A800-80G: the more of LobRA's four tasks, which its own times are of, and its
                                  twelve
plan64_gap, …                     how much longer the plan's step is at most than any could be, the larger of the two
plan64_complete, …                1: none of all plans was found better; 0: not all were tried
dispatch_ms                       median of buckets, dispatch and the samples of each replica: 1,500 samples in 16
                                  buckets over 12 replicas of five layouts
dispatch_cpu_ms                   the same in processor time: a busy machine adds to the former
figure4_step_s                    the step of the best plan for the example of LobRA's Figure 4(d): 14.829 by its tables
dispatch_gap                      how much longer the step is at most than the best dispatch's, the mean

htask64_s                         how long fusion takes to plan 64 tasks like those of the MuxTune paper
"""

from __future__ import annotations

import random
import statistics
import time

import typer

from benchmarks.deploy.published import DATA_SETS, FOUR, figure_4, published_jobs, replicas_70b
from benchmarks.deploy.saving import measure_7b, measure_savings
from benchmarks.figures import Kind, Parts, Targets
from benchmarks.report import (
    JsonFile,
    run_parts,
)
from weft.plan.cost.types import LinearCost
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.buckets import ReplicaModel, choose_buckets
from weft.plan.deploy.dispatch import dispatch
from weft.plan.deploy.fleet import Fleet
from weft.plan.deploy.kinds import without_dominated
from weft.plan.deploy.types import draw_batches, expected_batch
from weft.plan.fuse import FuseTask, Pipe, fuse

NUM_SAMPLES = 1500
REPLICAS = {(2, 2): 5, (2, 4): 2, (4, 2): 2, (8, 1): 2, (16, 1): 1}
"""By (tensor parallel, stages)."""


def measure_plans(cluster_sizes: tuple[int, ...] = (64, 256, 1024)) -> dict[str, float]:
    """Keys as in `python -m benchmarks deploy --json`."""
    values: dict[str, float] = {}
    batches = [expected_batch(published_jobs(names)) for names in (FOUR, tuple(DATA_SETS))]
    for num_gpus in cluster_sizes:
        kinds = [ReplicaKind(model) for model in replicas_70b(num_gpus)]
        times, found = [], []
        for batch in batches:
            began = time.process_time()
            chosen = tuple(without_dominated(kinds, batch))
            found.append(plan_deployment(DeployProblem(chosen, {"gpus": num_gpus}, batch)))
            times.append(time.process_time() - began)
        values[f"plan{num_gpus}_s"] = max(times)
        values[f"plan{num_gpus}_gap"] = max(plan.gap for plan in found)
        values[f"plan{num_gpus}_complete"] = float(all(plan.is_complete for plan in found))
    return values | {"figure4_step_s": plan_deployment(figure_4()).step_s}


def measure_dispatch(num_batches: int = 20) -> dict[str, float]:
    """Keys as in `python -m benchmarks deploy --json`."""
    known = {(model.layout.tensor, model.layout.stages): model for model in replicas_70b(64)}
    models: list[ReplicaModel] = [known[layout] for layout, count in REPLICAS.items() for _ in range(count)]
    times, processor, gaps = [], [], []
    for batch in draw_batches(published_jobs(), num_batches):
        lengths = batch[:NUM_SAMPLES]
        began, began_here = time.perf_counter(), time.process_time()
        buckets = choose_buckets(lengths)
        found = dispatch(Fleet(models, buckets))
        times.append(time.perf_counter() - began)
        processor.append(time.process_time() - began_here)
        gaps.append(found.gap)
    return {
        "dispatch_ms": 1e3 * statistics.median(times),
        "dispatch_cpu_ms": 1e3 * statistics.median(processor),
        "dispatch_gap": statistics.mean(gaps),
    }


PADDED_LENGTHS = (64, 128, 256)
"""SST2, OpenBookQA and RTE."""
BATCH_SIZES = (2, 4, 8, 16, 32)
NUM_STAGES = 4


def fuse_tasks(num_tasks: int, *, seed: int) -> list[FuseTask]:
    """Tasks with the padded lengths of three data sets and microbatches of 2 to 32 samples."""
    rng = random.Random(seed)
    return [
        FuseTask(f"task{i:03d}", (rng.choice(PADDED_LENGTHS),) * rng.choice(BATCH_SIZES), adapter_s=1e-5)
        for i in range(num_tasks)
    ]


def measure_fuse(*, num_tasks: int = 64, repeats: int = 5) -> dict[str, float]:
    """Seconds of one core to fuse 64 tasks on four stages, the median over different tasks."""
    cost = LinearCost(fixed_s=4e-3, token_s=2e-6, pair_s=1e-10, token_bytes=1_000)
    pipe = Pipe(cost, NUM_STAGES, num_microbatches=8)
    times_s = []
    for seed in range(repeats):
        tasks = fuse_tasks(num_tasks, seed=seed)
        begun = time.process_time()
        fuse(tasks, pipe)
        times_s.append(time.process_time() - begun)
    return {"htask64_s": statistics.median(times_s)}


TARGETS: Targets = {
    "plan64_s": (Kind.SECONDS, 5.0),
    "plan256_s": (Kind.SECONDS, 20.0),
    "plan1024_s": (Kind.SECONDS, 120.0),
    "dispatch_ms": (Kind.MILLISECONDS, 50.0),
    "gpu_seconds_saving": (Kind.SHARE, 0.45),
    "gpu_seconds_saving_packed": (Kind.SHARE, None),
    "gpu_seconds_saving_packed_weft": (Kind.SHARE, None),
    "ablation_length": (Kind.SHARE, None),
    "ablation_balanced": (Kind.SHARE, None),
    "ablation_bucketing": (Kind.SHARE, None),
    "htask64_s": (Kind.SECONDS, 0.5),
}
PARTS: Parts = {
    "plans of 70B-like replicas on 64, 256 and 1,024 GPUs": measure_plans,
    "1,500 samples shared out over 12 replicas": measure_dispatch,
    "GPU-seconds of twelve tasks on 64 GPUs, predicted": measure_savings,
    "six tasks of 7B on 16 GPUs, predicted from published tables": measure_7b,
    "64 tasks fused": measure_fuse,
}


def deploy(json: JsonFile = None) -> None:
    """Deployments of unlike replicas: how long planning and dispatch take, and the GPU-seconds they save, predicted."""
    raise typer.Exit(run_parts(PARTS, TARGETS, json))
