"""The backbone that a profile measures."""

from __future__ import annotations

import torch

from weft.bench.shapes import SHAPES, find_shape
from weft.bench.steps.regimes import Storage
from weft.bench.steps.step import make_backbone
from weft.errors import ModelError
from weft.kernels.device import has_gpu, is_gpu
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.spec import BackboneSpec

EMBEDDED = "tiny"
"""As a model to profile, the embedded backbone; every other name of a shape is built with random weights."""
GPU_CAPACITY, CPU_CAPACITY = 8192, 512


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
