"""Qwen 2, 2.5 and 3: Llama's layers with biases (2) or head norms (3), and windows on some of them."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.families.description import Config, Decoder, LayerKind
from weft.plan.families.layer_form import LayerForm
from weft.plan.families.llama import llama


def qwen2(config: Config, name: str) -> Decoder:
    return _qwen(config, name, LayerForm(has_qkv_bias=True))


def qwen3(config: Config, name: str) -> Decoder:
    bias = bool(config.get("attention_bias", False))
    return _qwen(config, name, LayerForm(has_qkv_bias=bias, has_head_norms=True))


def _qwen(config: Config, name: str, form: LayerForm) -> Decoder:
    plain = llama(config, name, form)
    kinds = config.get("layer_types") or ["full_attention"] * len(plain.layers)
    window = config.get("sliding_window")
    return replace(plain, layers=tuple(LayerKind(window if kind == "sliding_attention" else None) for kind in kinds))
