"""Figures of admission and cluster replay: a published week on 128 GPUs, and what planning costs a running engine."""

from __future__ import annotations

import gc
import time

import numpy as np

from benchmarks.planning.replay import Instance, ReplayReport, generate_trace, replay
from weft.cost.fit import FitError
from weft.data.dataset import Dataset, JobData
from weft.data.sample import Sample
from weft.engine.engine import Engine
from weft.plan.pack import planner_named
from weft.spec import AdapterSpec, BackboneSpec, JobSpec

SEED = 20260101
MAX_SHARED = 32
"""Jobs that share an instance at most: twice what fills a microbatch with the trace's jobs."""


def measure_cluster(*, horizon_s: float | None = None, num_steps: int = 24) -> dict[str, float]:
    """The replay of the week, shared and with one job per instance, and planning's share of an engine's steps."""
    start = time.perf_counter()
    trace = generate_trace(SEED) if horizon_s is None else generate_trace(SEED, horizon_s=horizon_s)
    shared = replay(trace, Instance(max_jobs=MAX_SHARED))
    single = replay(trace, Instance(max_jobs=1))
    figures = {"replay_week_s": time.perf_counter() - start}
    for name, report in (("shared", shared), ("single", single)):
        figures |= _figures(name, report)
    figures["replay_throughput_ratio"] = shared.throughput_tokens_s / single.throughput_tokens_s
    return figures | plan_share(num_steps=num_steps)


def plan_share(*, num_steps: int, planner: str = "auto") -> dict[str, float]:
    """Planning and admission of a run on the embedded backbone and a CPU, over its seconds of training.

    `plan_share_of_step` is what training waited for, `plan_share_ahead` what was planned in a thread beside it. More
    jobs than places, so that admission decides as well. `pace_mape` is how far the time of microbatches was off what
    the run had learnt to predict before.
    """
    backbone = BackboneSpec("tiny", device="cpu")
    engine = Engine(backbone, capacity=1024, max_jobs=4, planner=planner_named(planner))
    for number in range(6):
        adapter = AdapterSpec(r=8)
        spec = JobSpec(f"job{number}", ("random",), adapter=adapter, max_steps=num_steps, max_length=128, seed=number)
        engine.submit(spec, _random_data(number, engine.executor.facts.vocabulary))
    # What importing left behind is collected here, not in the middle of a plan, where it would take half a second.
    gc.collect()
    engine.run()
    seconds: dict[str, float] = {}
    for span in engine.timeline.spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.duration_s
    training = seconds["forward_backward"] + seconds["step"]
    runs = [span for span in engine.timeline.spans if "predicted_s" in span.args]
    error = FitError.of([span.args["predicted_s"] for span in runs], [span.duration_s for span in runs])
    return {
        "plan_share_of_step": seconds["plan"] / training,
        "plan_share_ahead": seconds.get("plan_ahead", 0.0) / training,
        "pace_mape": error.mape,
    }


def _figures(name: str, report: ReplayReport) -> dict[str, float]:
    return {
        f"replay_{name}_tokens_s": report.throughput_tokens_s,
        f"replay_{name}_jct_mean_s": report.jct_mean_s,
        f"replay_{name}_jct_p95_s": report.jct_p95_s,
        f"replay_{name}_queue_mean_s": report.queue_mean_s,
        f"replay_{name}_utilisation": report.utilisation,
    }


def _random_data(seed: int, vocabulary: int) -> JobData:
    rng = np.random.default_rng([SEED, seed])
    lengths = rng.integers(16, 129, 64)
    samples = [Sample(rng.integers(0, vocabulary, n, dtype=np.int32), np.ones(n, dtype=np.bool_)) for n in lengths]
    return JobData(Dataset.of(samples, "random tokens"), None)
