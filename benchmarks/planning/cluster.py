"""Figures of admission and cluster replay: a published week on 128 GPUs, and what planning costs a running engine.

The week is replayed with Llama-3.1-8B on one H200 per instance, simulated from speeds measured there
(`benchmarks/h200.json`).
The work of a job is what PEFT alone does in its published duration. Six ways share the same jobs:

weft        up to 32 jobs on an instance, packed, at Weft's measured speed, in tiles of 2,048 rows
weft_alone  one job on an instance, the same otherwise
peft        one job on an instance with PEFT as measured: batches padded to their own longest sample, never faster than
            the host launches it
peft_fast   the same with a host that launches twice as fast, because all of PEFT's time here is launches
mlora       up to 32 jobs on an instance, all padded to the longest sample of the microbatch, as mLoRA fuses batches;
            PEFT's measured speed is assumed for its kernels, and no more launches for more adapters
lobra       the same with each job's samples padded to a length of their own, as LobRA's buckets come to at best

A tile of a microbatch that is not full is assumed to take its share of a full one's time.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import numpy as np

from benchmarks.planning.replay import PEFT, Instance, ReplayReport, generate_trace, replay
from benchmarks.planning.replay.trace import WEEK_S
from weft.data.dataset import Dataset, JobData
from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.plan.cost.fit import FitError
from weft.plan.pack import planner_named
from weft.spec import AdapterSpec, BackboneSpec, JobSpec

SEED = 20260101
MAX_SHARED = 32
"""Jobs that share an instance at most."""
WAYS = {
    "weft": Instance(max_jobs=MAX_SHARED),
    "weft_alone": Instance(max_jobs=1),
    "peft": PEFT,
    "peft_fast": replace(PEFT, launch_s=PEFT.launch_s / 2),
    "mlora": replace(PEFT, max_jobs=MAX_SHARED, padding="fused"),
    "lobra": replace(PEFT, max_jobs=MAX_SHARED),
}


def measure_replay(*, horizon_s: float = WEEK_S) -> dict[str, float]:
    """The replay of the week in every way; `replay_week_s` is what one of them takes."""
    trace = generate_trace(SEED, horizon_s=horizon_s)
    figures, reports = {}, {}
    for name, instance in WAYS.items():
        start = time.perf_counter()
        reports[name] = replay(trace, instance, recorded_on=PEFT)
        if name == "weft":
            figures["replay_week_s"] = time.perf_counter() - start
        figures |= _figures(name, reports[name])
    for name in ("peft", "peft_fast", "mlora", "lobra"):
        ratio = reports["weft"].throughput_tokens_s / reports[name].throughput_tokens_s
        figures[f"replay_weft_over_{name}"] = ratio
    return figures


def plan_share(*, num_steps: int = 24, planner: str = "auto") -> dict[str, float]:
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
    # The garbage of importing is collected here, not in the middle of a plan, where it would take half a second.
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
        f"replay_{name}_fairness": report.fairness,
    }


def _random_data(seed: int, vocabulary: int) -> JobData:
    rng = np.random.default_rng([SEED, seed])
    lengths = rng.integers(16, 129, 64)
    samples = [Sample(rng.integers(0, vocabulary, n, dtype=np.int32), np.ones(n, dtype=np.bool_)) for n in lengths]
    return JobData(Dataset.of(samples, "random tokens"), None)
