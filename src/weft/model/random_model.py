"""Backbones of published shapes with random weights: speed depends on the shape alone, so nothing is downloaded.

Weights are drawn on the device itself, each from its own fixed seed, so two builds of one shape on one device are equal
to the bit.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from weft.adapters.frozen import quantise
from weft.model.backbone import Backbone
from weft.model.load import fp8_copies
from weft.model.model_part import ModelPart, keep_part
from weft.model.packing import attention
from weft.model.path import Memory
from weft.plan.cost.shape import Shape
from weft.plan.families import describe

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Storage:
    quantize: str = "none"
    recompute: Literal["none", "mlp", "full"] = "none"
    offload: bool = False

    @property
    def text(self) -> str:
        quantized = "" if self.quantize == "none" else f"_{self.quantize}"
        return f"{quantized}{'_offload' if self.offload else ''}"


def make_backbone(
    shape: Shape, storage: Storage, dtype: torch.dtype, device: torch.device, kernels: str = "auto"
) -> Backbone:
    """A backbone of this shape with weights stored as requested; at most one dense linear exists at a time."""
    attention.register()
    tokenizer: Any = None  # nothing is tokenised here
    if storage.quantize == "none":
        backbone = Backbone(build(shape, dtype, device, attention.NAME), tokenizer, shape.name)
    else:
        backbone = Backbone(build_outside_linears(shape, dtype, device, attention.NAME), tokenizer, shape.name)
        _fill_linears(backbone, storage.quantize, fp8_copies(shape.num_product_weights, device), device)
    backbone.use_kernels(kernels, Memory(storage.recompute, storage.offload))
    return backbone


def _fill_linears(backbone: Backbone, quantize: str, copies: int, device: torch.device) -> None:
    for path, linear in backbone.linears.items():
        weight_OD = random_weight(linear.frozen.dense(), f"{path}.weight", device)
        linear.frozen = quantise(weight_OD, quantize, copies=copies)
        if linear.bias_O is not None:
            bias_O = random_weight(linear.bias_O, f"{path}.bias", device)
            linear.bias_O = torch.nn.Parameter(bias_O, requires_grad=False)


def build(shape: Shape, dtype: torch.dtype, device: torch.device, attention: str, part: ModelPart | None = None) -> Any:
    """A transformers model of this shape, or a part of it, with random weights; seconds for 8 B parameters on a GPU."""
    model = build_empty(shape, dtype, attention)
    if part is not None:
        keep_part(model, part)
    for path, module in list(model.named_modules()):
        fill(module, path, device, _norm_value(shape))
    model.tie_weights()
    return model.requires_grad_(False)


def build_outside_linears(shape: Shape, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """The same, but its linears, except the head, have no storage yet: `random_weight` makes them one by one."""
    model = build_empty(shape, dtype, attention)
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module is head:
            fill(module, path, device, _norm_value(shape))
    model.tie_weights()
    return model.requires_grad_(False)


def build_empty(shape: Shape, dtype: torch.dtype, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=attention)


def _norm_value(shape: Shape) -> float:
    """Value of a norm's weights with which it multiplies by one."""
    return 0.0 if describe(shape.config().to_dict()).sizes.form.norm_weight == "one_plus" else 1.0


def fill(module: nn.Module, path: str, device: torch.device, norm_value: float = 1.0) -> None:
    """Gives one module's own weights storage and values, without submodules."""
    if any(name.endswith("inv_freq") for name in module._buffers):
        # Its table is computed by its constructor, so it is made again, where it belongs.
        with device:
            module.__init__(module.config)  # type: ignore[misc]
        return
    if hasattr(module, "scalar_embed_scale"):
        module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
    is_norm = "norm" in path.rpartition(".")[2]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            weight = random_weight(parameter, f"{path}.{name}", device)
            module._parameters[name] = nn.Parameter(
                weight.fill_(norm_value) if is_norm else weight, requires_grad=False
            )


def random_weight(like: torch.Tensor, path: str, device: torch.device) -> torch.Tensor:
    """A weight of this size and type; its values depend on its path only."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(path.encode()))
    return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(std=WEIGHT_STD, generator=generator)
