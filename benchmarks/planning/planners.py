"""The planners of a run beside each other: `planner: greedy`, `exact`, `auto` and `lorafusion`.

    OMP_NUM_THREADS=1 python -m benchmarks planners [--json FILE]

Four jobs with a global batch of 16 and 8,192 tokens a microbatch, for each mix of lengths in
`benchmarks/pipeline/four_jobs.py`; every job keeps its own order. By mix and planner:

num      microbatches on one device; a program has eight global batches of each job, as in training
empty    the part of them that no token fills
plan_s   seconds of planning such a program, on average
step_s   seconds of a global batch of all jobs on four stages of a 70B backbone, simulated, with the programs that
         `weft train` runs; `exact` is `auto` there
cpu      tokens per second of processor time, of whole runs of the embedded model with lengths and capacity of a
         thirty-second part, planning included; median of three, in turn
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import typer

from benchmarks.figures import Kind, Parts, Targets
from benchmarks.pipeline.four_jobs import (
    BATCH,
    CAPACITY,
    MIXES,
    NUM_SAMPLES,
    NUM_STAGES,
    SEED,
    LayerCost,
    LengthMix,
    execute,
    queues,
    split_cost,
)
from benchmarks.planning.groups import SHARES, measure_groups, measure_job_share
from benchmarks.report import JsonFile, run_parts
from weft.data.dataset import Dataset, JobData
from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.engine.jobs.progress import PLANNED_BATCHES
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.plan.check import violations
from weft.plan.pack import planner_named
from weft.plan.pack.lorafusion import LoraFusionPlanner
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.planner import Planner
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.types import JobQueue, Limits
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.spec.run import PLANNERS

TOKEN_S = 3.5e-6
"""Seconds of a token in a layer, in which `LayerCost` counts."""
SHRINK, TRAINED_STEPS, REPEATS = 32, 3, 3


def measure_planning(mix: LengthMix, num_samples: int = NUM_SAMPLES) -> dict[str, float]:
    """Microbatches on one device and planning of every planner."""
    jobs = queues(mix, num_samples, BATCH)
    most = max(len(queue.batches) for queue in jobs)
    windows = [
        [replace(queue, batches=queue.batches[first : first + PLANNED_BATCHES]) for queue in jobs]
        for first in range(0, most, PLANNED_BATCHES)
    ]
    tokens = sum(sum(batch.lengths) for queue in jobs for batch in queue.batches)
    limits, found = Limits(CAPACITY, num_samples), dict[str, float]()
    for name in PLANNERS:
        planner, num, began = planner_named(name), 0, time.perf_counter()
        programs = [planner(own, limits) for own in windows]
        took = time.perf_counter() - began
        for own, program in zip(windows, programs, strict=True):
            assert not violations(program, own, limits), "a planner's program is valid"
            num += len(program.microbatches)
        found |= {
            f"{mix.name}_{name}_num": num,
            f"{mix.name}_{name}_empty": 1 - tokens / (num * CAPACITY),
            f"{mix.name}_{name}_plan_s": took / len(windows),
        }
    return found


def measure_stages(mix: LengthMix, num_samples: int = NUM_SAMPLES) -> dict[str, float]:
    """Simulated seconds of a global batch of all jobs."""
    jobs, cost = queues(mix, num_samples, BATCH), split_cost()
    rounds = max(len(queue.batches) for queue in jobs)
    return {
        f"{mix.name}_{name}_step_s": TOKEN_S * execute(planner, jobs, Limits(CAPACITY), cost).makespan_s / rounds
        for name, planner in staged(cost).items()
    }


def staged(cost: LayerCost) -> dict[str, Planner]:
    """The planners of stages, by name, with this cost model in place of a backbone's."""
    return {
        "greedy": PipelinePlanner(Schedule.EAGER, NUM_STAGES),
        "auto": FastestPipeline(NUM_STAGES, cost),
        "lorafusion": PipelinePlanner(Schedule.MULTI_ADAPTER, NUM_STAGES, LoraFusionPlanner(NUM_STAGES)),
    }


def measure_cpu(mix: LengthMix, steps: int = TRAINED_STEPS, repeats: int = REPEATS) -> dict[str, float]:
    """Tokens per second of processor time on the embedded model."""
    backbone = load_backbone(BackboneSpec("tiny", device="cpu"))
    jobs = queues(mix, 4 * BATCH * steps, BATCH)
    rates: dict[str, list[float]] = {name: [] for name in PLANNERS}
    for _ in range(repeats):
        for name, own in rates.items():
            own.append(_cpu_rate(backbone, name, jobs))
    return {f"{mix.name}_{name}_cpu": statistics.median(own) for name, own in rates.items()}


def _cpu_rate(backbone: Backbone, planner: str, jobs: Sequence[JobQueue]) -> float:
    engine = Engine(backbone, capacity=CAPACITY // SHRINK, planner=planner_named(planner))
    tokens = 0
    for number, queue in enumerate(jobs):
        lengths = [max(2, n // SHRINK) for batch in queue.batches for n in batch.lengths]
        rng = np.random.default_rng([SEED, number])
        ids = (rng.integers(0, engine.executor.facts.vocabulary, n, dtype=np.int32) for n in lengths)
        data = Dataset.of([Sample(own, np.ones(len(own), dtype=np.bool_)) for own in ids], "random tokens")
        spec = JobSpec(
            queue.job,
            ("random",),
            adapter=AdapterSpec(r=8),
            max_steps=len(queue.batches),
            global_batch_size=BATCH,
            max_length=CAPACITY // SHRINK,
        )
        engine.submit(spec, JobData(data, None))
        tokens += sum(lengths)
    began = time.process_time()
    engine.run()
    return tokens / (time.process_time() - began)


KINDS = {
    "num": Kind.COUNT,
    "empty": Kind.WASTE,
    "plan_s": Kind.SECONDS,
    "step_s": Kind.SECONDS,
    "cpu": Kind.TOKENS_PER_S,
}
TARGETS: Targets = {
    f"{mix.name}_{name}_{figure}": (kind, None) for mix in MIXES for figure, kind in KINDS.items() for name in PLANNERS
} | {
    "job_share_cpu": (Kind.WASTE, None),
    "job_share_h200": (Kind.WASTE, None),
    **{f"groups_of_12_at_{share}": (Kind.COUNT, None) for share in SHARES},
    **{f"groups_gain_at_{share}": (Kind.SHARE, None) for share in SHARES},
}
PARTS: Parts = {
    **{f"planning {mix.name}": functools.partial(measure_planning, mix) for mix in MIXES},
    **{f"stages {mix.name}": functools.partial(measure_stages, mix) for mix in MIXES},
    "training": functools.partial(measure_cpu, MIXES[-1]),
    "a further job": measure_job_share,
    "groups of jobs": measure_groups,
}


def planners(json: JsonFile = None) -> None:
    """Every planner of a run beside the others."""
    raise typer.Exit(run_parts(PARTS, TARGETS, json))
