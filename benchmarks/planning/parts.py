"""All figures of planning: packing, pipelines, cost models, replay. Nothing here needs a GPU or a data file.

Packing: time, microbatches above the lower bound, and the share of rounds proven optimal. Cost models: how well they
predict this machine, by a profile of a real backbone that is checked on shapes it never saw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import typer

from benchmarks.deploy.published import padded_layer_s
from benchmarks.figures import Kind, Parts, Targets
from benchmarks.pipeline.four_jobs import MIXES, queues
from benchmarks.planning.cluster import measure_replay, plan_share
from benchmarks.planning.pipeline import measure_pipeline, measure_settings, summary
from benchmarks.report import JsonFile, run_parts
from weft.cli.measure import default_capacity, open_backbone
from weft.engine.execute.profile import measure_profile
from weft.kernels.device import has_gpu
from weft.plan.cost.fit import FitError, PaddedBatch, fit_padded
from weft.plan.cost.profile import Measurement, Profile, load_profile
from weft.plan.cost.shape import EMBEDDED
from weft.plan.cost.types import LinearCost
from weft.plan.pack.rounds import pack_rounds
from weft.plan.pack.types import RoundLimits

PROFILE = LinearCost(fixed_s=1e-3, token_s=8e-6, pair_s=1.3e-10)
"""About a quarter of an 8B model on one GPU: 16 GFLOP and 0.26 MFLOP per token of context, at 500 TFLOP/s."""


def measure_pack(num_samples: int = 25_600, global_batch: int = 16, capacity: int = 8192) -> dict[str, float]:
    """Packs four jobs of unlike lengths for four stages; keys as in `python -m benchmarks planning --json`."""
    jobs = queues(MIXES[-1], num_samples, global_batch)
    limits = RoundLimits(capacity, 4)
    began = time.perf_counter()
    plan = pack_rounds(jobs, limits, cost=PROFILE)
    took = time.perf_counter() - began
    return {
        f"pack_s_{num_samples}": took,
        "pack_over_lower_bound": plan.num_microbatches / sum(r.fewest for r in plan.rounds) - 1.0,
        "pack_proven_share": sum(r.is_proven for r in plan.rounds) / len(plan.rounds),
        "pack_fewest_share": sum(r.is_fewest for r in plan.rounds) / len(plan.rounds),
        "pack_fill": sum(m.num_tokens for m in plan.stream) / (plan.num_microbatches * plan.limits.capacity),
        "pack_noops": float(len(plan.stream) - plan.num_microbatches),
    }


GPU_MODEL = "llama-3.1-8b"


def measure_cost(
    model: str | None = None,
    *,
    capacity: int | None = None,
    profile: Path | None = None,
    show: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """The cost models' figures, from a stored profile or from one measured now."""
    if profile is not None:
        return figures(load_profile(profile))
    model = model or (GPU_MODEL if has_gpu() else EMBEDDED)
    backbone = open_backbone(model)
    return figures(measure_profile(backbone, capacity=capacity or default_capacity(backbone), report=show))


def figures(found: Profile) -> dict[str, float]:
    """Errors on held-out shapes."""
    return {
        "memory_mape": found.errors["peak_bytes"].mape,
        "memory_reserved_mape": found.errors["reserved_bytes"].mape,
        "step_time_mape": found.time_error.mape,
        "padded_time_mape": padded_error(found).mape,
    }


def padded_error(found: Profile) -> FitError:
    """How LobRA's t(b, s) does on the same measurements: it knows batches of equal lengths and nothing of adapters."""
    layers = found.setup.num_layers
    time = fit_padded([_as_padded(m, layers) for m in found.measurements if not m.held_out])
    held = [_as_padded(m, layers) for m in found.measurements if m.held_out]
    predicted = [layers * padded_layer_s(time, batch.size, batch.length) for batch in held]
    return FitError.of(predicted, [batch.seconds for batch in held])


def _as_padded(measured: Measurement, num_layers: int) -> PaddedBatch:
    load = measured.load
    size, length = load.pairs // load.longest_pairs, math.isqrt(load.longest_pairs)
    return PaddedBatch(size, length, num_layers, measured.forward_s + measured.backward_s)


TARGETS: Targets = {
    "pack_s_25600": (Kind.SECONDS, 5.0),
    "pack_over_lower_bound": (Kind.WASTE, 0.01),
    "pack_proven_share": (Kind.SHARE, 0.99),
    "bubble_het4": (Kind.WASTE, 0.06),
    "bubble_1f1b": (Kind.WASTE, None),
    "bubble_mlora": (Kind.WASTE, None),
    "bubble_lorafusion": (Kind.WASTE, None),
    "bubble_worst20": (Kind.WASTE, 0.09),
    "bubble_mean20": (Kind.WASTE, 0.04),
    "plan_share_of_step": (Kind.WASTE, 0.01),
    "memory_mape": (Kind.WASTE, 0.0025),
    "replay_week_s": (Kind.SECONDS, 30.0),
    "replay_weft_over_peft": (Kind.SPEEDUP, None),
    "replay_weft_over_peft_fast": (Kind.SPEEDUP, None),
    "replay_weft_over_mlora": (Kind.SPEEDUP, None),
    "replay_weft_over_lobra": (Kind.SPEEDUP, None),
}
PARTS: Parts = {
    "packing": measure_pack,
    "pipelines": measure_pipeline,
    "20 settings": lambda: summary(measure_settings()),
    "cost models": measure_cost,
    "a cluster's week": measure_replay,
    "planning beside training": plan_share,
}


def planning(json: JsonFile = None) -> None:
    """Packing, pipelines, cost models and a cluster's week, replayed."""
    raise typer.Exit(run_parts(PARTS, TARGETS, json))
