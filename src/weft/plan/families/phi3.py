"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with q, k, v and gate, up as one module each; some rotate a part of a
head."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.families.description import Config, Decoder, LayerKind, read_window
from weft.plan.families.layer_form import JOINED, LayerForm
from weft.plan.families.llama import llama


def phi3(config: Config, name: str) -> Decoder:
    plain = llama(config, name, LayerForm(sites=JOINED))
    return replace(plain, layers=(LayerKind(window=read_window(config)),) * len(plain.layers))
