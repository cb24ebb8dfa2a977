"""How well the cost models predict this machine: a profile of a real backbone, checked on shapes it never saw."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from weft.backbone.backbone import Backbone
from weft.backbone.load import load_backbone
from weft.bench.regimes import Storage
from weft.bench.shapes import SHAPES, find_shape
from weft.bench.step import make_backbone
from weft.cost.fit import FitError
from weft.cost.padded import PaddedBatch, fit_padded
from weft.cost.profile import Measurement, Profile, load_profile
from weft.errors import ModelError
from weft.execute.profile import measure_profile
from weft.kernels.device import has_gpu, is_gpu
from weft.spec import BackboneSpec

EMBEDDED = "tiny"
"""As a model to profile, the embedded backbone; every other name of a shape is built with random weights."""
GPU_MODEL, GPU_CAPACITY, CPU_CAPACITY = "llama-3.1-8b", 8192, 512


def open_backbone(
    model: str, quantize: str = "none", recompute: str = "none", kernels: str = "auto", device: str = "auto"
) -> Backbone:
    """A backbone to measure: a named shape with random weights, or whatever `base_model` may be."""
    spec = BackboneSpec(model, device=device, quantize=quantize, kernels=kernels, recompute=recompute)
    if model == EMBEDDED or model not in SHAPES:
        return load_backbone(spec)
    if spec.device == "cpu" or not has_gpu():
        raise ModelError(
            f"the shape {model} is measured on a CUDA GPU, and none is used; tiny and model directories run anywhere.",
            where="--model",
        )
    storage = Storage(quantize, spec.recompute)  # type: ignore[arg-type]
    return make_backbone(find_shape(model), storage, torch.bfloat16, torch.device("cuda", 0), kernels)


def default_capacity(backbone: Backbone) -> int:
    """The largest microbatch a profile measures unless told otherwise."""
    return GPU_CAPACITY if is_gpu(backbone.device) else CPU_CAPACITY


def measure_cost(
    model: str | None = None,
    *,
    capacity: int | None = None,
    profile: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """The cost models' figures, from a stored profile or from one measured now."""
    if profile is not None:
        return figures(load_profile(profile))
    model = model or (GPU_MODEL if has_gpu() else EMBEDDED)
    backbone = open_backbone(model)
    return figures(measure_profile(backbone, capacity=capacity or default_capacity(backbone), say=say))


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
    predicted = [time.step_s([(batch.size, batch.size, batch.length)], layers) for batch in held]
    return FitError.of(predicted, [batch.seconds for batch in held])


def _as_padded(measured: Measurement, num_layers: int) -> PaddedBatch:
    load = measured.load
    size, length = load.pairs // load.longest_pairs, math.isqrt(load.longest_pairs)
    return PaddedBatch(size, length, num_layers, measured.forward_s + measured.backward_s)
