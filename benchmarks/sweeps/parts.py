"""All figures of sweeps that need no GPU and no data file; `step` has those of real ones (`sweep32_…`).

PLoRA's 120 configurations on eight A100-40G are planned, bounded and compared with one by one. The space is a grid over
its Table 1: batches 1 to 32, ranks 8 to 128, and four settings of learning rate and alpha, which change no time. Times
come from `AnalyticCost` (met by an H200 within 10 %), PEFT's from what was measured there (`plan/sweep/bounds.py`).
"""

from __future__ import annotations

import time

import typer

from benchmarks.figures import Kind, Parts, Targets
from benchmarks.report import JsonFile, run_parts
from benchmarks.sweeps.plan_check import violations
from benchmarks.sweeps.published import plan_published
from benchmarks.sweeps.train import measure_early_stop, measure_sweep_together
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ModelShape
from weft.plan.decoder import LayerForm
from weft.plan.sweep import Configuration, SweepPlan, plan_sweep
from weft.plan.sweep.bounds import Solo
from weft.plan.sweep.cost import SweepSetting

BATCHES, RANKS, NUM_OTHERS = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, 128), 4
NUM_SAMPLES = 4096
"""Trained by every configuration; all times are proportional to it."""
DEVICE, NUM_GPUS = "a100-40", 8
QWEN25 = {
    "3b": ModelShape("qwen2.5-3b", 2048, 11008, 36, 16, 2, 128, 151936, tied=True, form=LayerForm(has_qkv_bias=True)),
    "7b": ModelShape("qwen2.5-7b", 3584, 18944, 28, 28, 4, 128, 152064, form=LayerForm(has_qkv_bias=True)),
    "14b": ModelShape("qwen2.5-14b", 5120, 13824, 48, 40, 8, 128, 152064, form=LayerForm(has_qkv_bias=True)),
    "32b": ModelShape("qwen2.5-32b", 5120, 27648, 64, 40, 8, 128, 152064, form=LayerForm(has_qkv_bias=True)),
}
LENGTHS = {"": (1024, 1024), "_gsm8k": (152, 434), "_rte": (76, 298), "_sst2": (23, 66)}
"""Mean and longest sample: every sample of 1,024 tokens; real ones of GSM8K, one of PLoRA's four tasks; of RTE, a pair
of sentences like its mrpc and wnli; and of SST-2, a single one like its cola."""


def paper_space(sample_tokens: int = 1024, longest_tokens: int = 1024) -> list[Configuration]:
    """The 120 configurations."""
    return [
        Configuration(f"b{batch}-r{rank}-{other}", rank, batch, NUM_SAMPLES // batch, sample_tokens, longest_tokens)
        for other in range(NUM_OTHERS)
        for batch in BATCHES
        for rank in RANKS
    ]


def measure_sweep_plan(sizes: tuple[str, ...] = tuple(QWEN25), *, with_published: bool = True) -> dict[str, float]:
    """Keys as in `python -m benchmarks sweeps --json`; time and ratio are the worst of all sizes at 1,024 tokens."""
    figures = {"plan120_s": 0.0, "approximation_ratio": 0.0}
    for name, (mean, longest) in LENGTHS.items():
        space = paper_space(mean, longest)
        for size in sizes:
            began = time.perf_counter()
            plan = plan_sweep(space, QWEN25[size], DEVICE, NUM_GPUS)
            took = time.perf_counter() - began
            assert not violations(plan, space)
            assert plan.speedup is not None
            figures[f"sim_makespan_{size}{name}"] = plan.speedup
            figures[f"sim_batch8_{size}{name}"] = batch8(QWEN25[size], mean, longest)
            if not name:
                figures["plan120_s"] = max(took, figures["plan120_s"])
                figures["approximation_ratio"] = max(plan.approximation_ratio, figures["approximation_ratio"])
                figures[f"sim_ceiling_{size}"] = ceiling(plan, QWEN25[size])
            else:
                key = f"approximation_ratio{name}"
                figures[key] = max(plan.approximation_ratio, figures.get(key, 0.0))
    return figures | (published(sizes) if with_published else {})


def published(sizes: tuple[str, ...]) -> dict[str, float]:
    """PLoRA's own planner on the same space and the same model of time; worst of all sizes."""
    began = time.perf_counter()
    found = [plan_published(paper_space(), QWEN25[size], DEVICE, NUM_GPUS) for size in sizes]
    return {
        "published_plan120_s": (time.perf_counter() - began) / len(found),
        "published_ratio": max(one.plan.approximation_ratio for one in found),
        "published_tail_bound": max(one.tail_bound for one in found),
    }


def batch8(shape: ModelShape, sample_tokens: int, longest_tokens: int) -> float:
    """Time of a step of 8 samples over that of 1, with PEFT on the GPUs that 8 take; PLoRA measured 1.10 for 7B."""
    solo = Solo(SweepSetting(shape, find_hardware(DEVICE), NUM_GPUS))
    one, eight = (Configuration(f"b{n}", 32, n, 1, sample_tokens, longest_tokens) for n in (1, 8))
    found = solo.cheapest(eight)
    assert found is not None
    degree, seconds = found
    return seconds / solo.seconds(one, degree)


def ceiling(plan: SweepPlan, shape: ModelShape) -> float:
    """Speed-up over one by one if every GPU did nothing but the frozen products, at the rate of one large product."""
    assert plan.one_by_one_s is not None
    flop = 4 * plan.num_tokens * (shape.num_layers * shape.layer_weights + shape.head_weights)
    return plan.one_by_one_s * plan.num_gpus * find_hardware(plan.device).product_flop / flop


_SIZES = ("3b", "7b", "14b", "32b")
TARGETS: Targets = {
    "plan120_s": (Kind.SECONDS, 20.0),
    "approximation_ratio": (Kind.TIME_RATIO, 1.05),
    "published_ratio": (Kind.TIME_RATIO, None),
    **{f"sim_makespan_{size}": (Kind.SPEEDUP, 7.5) for size in _SIZES},
    **{f"sim_ceiling_{size}": (Kind.SPEEDUP, None) for size in _SIZES},
    **{f"sim_makespan_{size}_{task}": (Kind.SPEEDUP, None) for task in ("gsm8k", "rte", "sst2") for size in _SIZES},
    "cpu16": (Kind.SPEEDUP, 3.0),
    "cpu16_largest_difference": (Kind.ERROR, 1e-5),
    "cpu16_same_best": (Kind.SHARE, 1.0),
    "cpu16_processes": (Kind.SPEEDUP, None),
    "cpu16_batch4": (Kind.SPEEDUP, None),
    "early_stop_tokens": (Kind.SPEEDUP, 2.0),
    "early_stop_same_best": (Kind.SHARE, None),
}
PARTS: Parts = {
    "planning": measure_sweep_plan,
    "together": measure_sweep_together,
    "early stopping": measure_early_stop,
}


def sweeps(json: JsonFile = None) -> None:
    """Sweeps: plans beside PLoRA's, configurations together, early stopping."""
    raise typer.Exit(run_parts(PARTS, TARGETS, json))
