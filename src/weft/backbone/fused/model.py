"""What the fused step needs of a model: its layers as four products each, and the numbers around them.

q, k, v share one frozen product, and so do gate and up: their weights are stored as one, of which the model's own
linears then are parts. Nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.adapters.frozen import FrozenWeight, join
from weft.adapters.linear import SlotLinear
from weft.backbone.fused.attention import needs_bounds
from weft.families.description import Decoder
from weft.families.kept import moved_names
from weft.families.registry import FAMILIES, describe
from weft.kernels.device import is_gpu
from weft.kernels.layers.rotary import Heads, Norms
from weft.kernels.lora.tables import Site

ACTIVATIONS = ("silu",)
"""Gated activations there are kernels for."""
ROTARY_SCALINGS = ("default", "linear", "llama3", "yarn")
"""Rotary positions that do not depend on how long a sample is."""


@dataclass(frozen=True)
class Product:
    """A site with its frozen weight."""

    site: Site
    weight: FrozenWeight
    bias_O: torch.Tensor | None


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    norm_in_D: torch.Tensor
    norm_mid_D: torch.Tensor
    head_norms: Norms | None
    window: int | None
    """Keys a query sees; None: all before it."""


@dataclass(frozen=True, eq=False)
class FusedModel:
    """A whole model."""

    embedding_VD: torch.Tensor
    layers: tuple[FusedLayer, ...]
    norm_D: torch.Tensor
    eps: float
    heads: Heads
    frequencies_F: torch.Tensor
    """Rotary frequencies, half a head of them."""
    rotary_scale: float
    attention_scale: float
    moved: tuple[str, ...]
    """What `offload` moves of what a layer keeps."""

    @property
    def sites(self) -> list[Site]:
        """Every site, in the order of the modules."""
        return [p.site for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]


def why_not(model: Any, linears: Mapping[str, SlotLinear], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model cannot take the fused step on a device; None if it can."""
    config = model.config
    if len({type(linear.frozen) for linear in linears.values()}) > 1:
        return "some of its weights could not be quantised"
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not among {', '.join(FAMILIES)}"
    decoder = describe(config.to_dict())
    size = decoder.sizes.head_size
    if decoder.sizes.form.activation not in ACTIVATIONS:
        return f"its activation is {decoder.sizes.form.activation}, not {' or '.join(ACTIVATIONS)}"
    for rotary in decoder.rotaries:
        if rotary.scaling not in ROTARY_SCALINGS:
            return f"its rotary positions are {rotary.scaling}"
        if rotary.share != 1.0:
            return "its rotary positions cover a part of each head"
    if is_gpu(device) and dtype == torch.float32:
        return "its weights are float32, and a GPU's kernels take bfloat16 or float16"
    if is_gpu(device) and (size > 256 or (needs_bounds(device) and size % 8)):
        return f"attention on this GPU does not take heads of {size}"
    return None


def fuse(model: Any, linears: Mapping[str, SlotLinear]) -> FusedModel:
    """The model's layers with joined weights; its own linears become parts of them."""
    decoder, modules = describe(model.config.to_dict()), model.base_model
    sizes = decoder.sizes
    layers = tuple(_layer(i, block, decoder, linears) for i, block in enumerate(modules.layers))
    rotary = modules.rotary_emb
    return FusedModel(
        embedding_VD=model.get_input_embeddings().weight,
        layers=layers,
        norm_D=modules.norm.weight,
        eps=modules.norm.variance_epsilon,
        heads=Heads(sizes.num_heads, sizes.num_kv_heads, sizes.head_size),
        frequencies_F=rotary.inv_freq.float(),
        rotary_scale=float(rotary.attention_scaling),
        attention_scale=decoder.attention_scale,
        moved=moved_names(sizes),
    )


def _layer(index: int, block: Any, decoder: Decoder, linears: Mapping[str, SlotLinear]) -> FusedLayer:
    form, paths = decoder.sizes.form, list(linears)
    prefix = next(path for path in paths if f"layers.{index}." in path).partition(f"layers.{index}.")[0]
    named = ([f"{prefix}layers.{index}.{name}" for name in names] for names in form.sites)
    qkv, out, gate_up, down = (_product(names, linears, paths) for names in named)
    head_norms = None
    if form.has_head_norms:
        q_norm, k_norm = block.self_attn.q_norm, block.self_attn.k_norm
        head_norms = (q_norm.weight, k_norm.weight, q_norm.variance_epsilon)
    return FusedLayer(
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        norm_in_D=getattr(block, form.norms.before_attention).weight,
        norm_mid_D=getattr(block, form.norms.before_mlp).weight,
        head_norms=head_norms,
        window=decoder.layers[index].window,
    )


def _product(names: list[str], linears: Mapping[str, SlotLinear], paths: list[str]) -> Product:
    parts = [linears[name] for name in names]
    first = paths.index(names[0])
    assert paths[first : first + len(names)] == names, "linears of a site follow one another"
    site = Site(first, tuple(part.out_features for part in parts), parts[0].in_features)
    weight = parts[0].frozen if len(parts) == 1 else join([part.frozen for part in parts])
    if len(parts) > 1:
        for part, start, size in zip(parts, site.starts, site.sizes, strict=True):
            part.frozen = weight.part(start, start + size)
    biases = [part.bias_O for part in parts]
    if all(bias is None for bias in biases):
        return Product(site, weight, None)
    zeros = [torch.zeros(size, device=weight_device(weight), dtype=weight.dtype) for size in site.sizes]
    joined = torch.cat([zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)])
    return Product(site, weight, joined)


def weight_device(weight: FrozenWeight) -> torch.device:
    """Where a frozen weight lies."""
    return next(iter(weight.stored.values())).device
