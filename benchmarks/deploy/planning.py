"""How long it takes to plan a deployment, and to share out a step's batch.

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
"""

from __future__ import annotations

import statistics
import time

from benchmarks.deploy.published import DATA_SETS, FOUR, figure_4, published_jobs, replicas_70b
from weft.plan.bucket import choose_buckets
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.kinds import without_dominated
from weft.plan.deploy.workload import draw_batches, expected_batch
from weft.plan.dispatch import Fleet, ReplicaModel, dispatch

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
        found = dispatch(Fleet.of(models, buckets))
        found.assign(lengths, buckets)
        times.append(time.perf_counter() - began)
        processor.append(time.process_time() - began_here)
        gaps.append(found.gap)
    return {
        "dispatch_ms": 1e3 * statistics.median(times),
        "dispatch_cpu_ms": 1e3 * statistics.median(processor),
        "dispatch_gap": statistics.mean(gaps),
    }
