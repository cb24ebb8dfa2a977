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
from weft.kernels.device import is_gpu
from weft.kernels.layers.rotary import Heads, Norms
from weft.kernels.lora.tables import Site

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are: norm, attention with rotary positions, norm, SwiGLU."""
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATES = ("mlp.gate_proj", "mlp.up_proj")
_SITES = (_ATTENTION, ("self_attn.o_proj",), _GATES, ("mlp.down_proj",))


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
    """A whole llama-like model."""

    embedding_VD: torch.Tensor
    layers: tuple[FusedLayer, ...]
    norm_D: torch.Tensor
    eps: float
    heads: Heads
    frequencies_F: torch.Tensor
    """Rotary frequencies, half a head of them."""
    rotary_scale: float
    attention_scale: float

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
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        return f"its rotary positions are {rope['rope_type']}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary positions cover a part of each head"
    size = model.base_model.layers[0].self_attn.head_dim
    if is_gpu(device) and dtype == torch.float32:
        return "its weights are float32, and a GPU's kernels take bfloat16 or float16"
    if is_gpu(device) and (size > 256 or (needs_bounds(device) and size % 8)):
        return f"attention on this GPU does not take heads of {size}"
    return None


def fuse(model: Any, linears: Mapping[str, SlotLinear]) -> FusedModel:
    """The model's layers with joined weights; its own linears become parts of them."""
    config, decoder = model.config, model.base_model
    paths = list(linears)
    layers = tuple(_layer(i, block, linears, paths, config) for i, block in enumerate(decoder.layers))
    rotary = decoder.rotary_emb
    size = decoder.layers[0].self_attn.head_dim
    return FusedModel(
        model.get_input_embeddings().weight,
        layers,
        decoder.norm.weight,
        decoder.norm.variance_epsilon,
        Heads(config.num_attention_heads, config.num_key_value_heads, size),
        rotary.inv_freq.float(),
        float(rotary.attention_scaling),
        float(decoder.layers[0].self_attn.scaling),
    )


def _layer(index: int, block: Any, linears: Mapping[str, SlotLinear], paths: list[str], config: Any) -> FusedLayer:
    prefix = next(path for path in paths if f"layers.{index}." in path).partition(f"layers.{index}.")[0]
    named = ([f"{prefix}layers.{index}.{name}" for name in names] for names in _SITES)
    qkv, out, gate_up, down = (_product(names, linears, paths) for names in named)
    attention = block.self_attn
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
    # Mistral has one window for all layers, Qwen one per layer.
    window = getattr(attention, "sliding_window", config.sliding_window if config.model_type == "mistral" else None)
    weights = block.input_layernorm.weight, block.post_attention_layernorm.weight
    return FusedLayer(qkv, out, gate_up, down, *weights, norms, window)


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
