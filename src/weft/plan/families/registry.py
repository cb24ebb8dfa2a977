"""The families of the fast path, the description of any decoder, and the reasons why some cannot be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from weft.plan.families.description import Config, Decoder
from weft.plan.families.gemma3 import gemma3
from weft.plan.families.layer_form import JOINED, SEPARATE, Activation
from weft.plan.families.llama import llama
from weft.plan.families.mistral import mistral
from weft.plan.families.phi3 import phi3
from weft.plan.families.qwen import qwen2, qwen3

FAMILIES: Mapping[str, Callable[[Config, str], Decoder]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi3": phi3,
    "gemma3_text": gemma3,
}
"""Functions that describe a decoder, by transformers' model type."""
REFERENCE_FAMILIES = (
    "gemma2",
    "opt",
    "gpt_neox",
    "granite",
    "cohere",
    "cohere2",
    "gpt2",
    "gpt_neo",
    "gptj",
    "codegen",
    "falcon",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
)
"""Model types that run on the reference path and are tested against PEFT as those of the fast path are; any other is
checked against its own attention when it is loaded. Experts stay frozen."""
ROTARY_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
"""Rotary positions that do not depend on the length of a sample; longrope's do beyond `Backbone.max_positions`."""
LINEARS = tuple(dict.fromkeys(path.rpartition(".")[2] for site in (*SEPARATE, *JOINED) for path in site))
"""Names of the linears of a layer in any family."""


def describe(config: Config, name: str = "") -> Decoder:
    """The decoder in a transformers configuration; an unknown family is described like Llama, for estimates."""
    # Models with images or audio have their decoder's settings one level down.
    config = config.get("text_config") or config
    return FAMILIES.get(str(config.get("model_type", "")), llama)(config, name)


def why_unsupported(config: Config) -> str | None:
    """Reason why the fast path does not take the model of a transformers configuration; None if it does."""
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        return f"{kind} is not among {', '.join(FAMILIES)}"
    decoder = describe(config)
    if decoder.sizes.form.activation is None:
        return f"its activation is not {' or '.join(get_args(Activation))}"
    for rotary in decoder.rotaries:
        if rotary.scaling not in ROTARY_SCALINGS:
            return f"its rotary positions are {rotary.scaling}"
    return None


_STATE = "keeps a state that runs on from one sample into the next, so samples cannot be packed"
_ALIBI = "adds scores for positions inside its attention (alibi), which Weft does not support yet"
_WITH_STATE = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
)
OBSTACLES: Mapping[str, str] = {
    **dict.fromkeys(_WITH_STATE, _STATE),
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "gpt_oss": "has attention sinks, which Weft does not support yet",
}


_DIVIDED = ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid")
_MULTIPLIED = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "cohere_compass": "logit_scale",
    "hyperclovax": "logits_scaling",
}


def logit_scale(family: str, config: Config) -> float | None:
    """The factor between the output head's product and the logits; None if there is none."""
    if family in _DIVIDED:
        return 1.0 / float(config["logits_scaling"])
    if family in _MULTIPLIED:
        return float(config[_MULTIPLIED[family]])
    return None
