"""Mistral: Llama's layers, all with one window where the configuration names it."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.families.description import Config, Decoder, LayerKind
from weft.plan.families.llama import llama


def mistral(config: Config, name: str) -> Decoder:
    plain = llama(config, name)
    return replace(plain, layers=(LayerKind(window=config.get("sliding_window")),) * len(plain.layers))
