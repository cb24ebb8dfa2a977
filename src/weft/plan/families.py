"""Decoder families on the fast path: the structure of their layers, as plain data that needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import get_args

from weft.plan.decoder import (
    ACTIVATIONS,
    JOINED,
    SEPARATE,
    Activation,
    Config,
    Decoder,
    LayerForm,
    LayerKind,
    NormModules,
    read_rotary,
    read_sizes,
    read_window,
)


def llama(config: Config, name: str, form: LayerForm | None = None) -> Decoder:
    """The decoder in a configuration; families with another form of layers pass theirs."""
    if form is None:
        form = LayerForm(has_qkv_bias=bool(config.get("attention_bias", False)))
    activation = ACTIVATIONS.get(config.get("hidden_act", "silu"))
    sizes = read_sizes(config, name, replace(form, activation=activation))
    return Decoder(
        family=str(config.get("model_type", "llama")),
        sizes=sizes,
        layers=(LayerKind(),) * sizes.num_layers,
        attention_scale=sizes.head_size**-0.5,
        rotaries=(read_rotary(config),),
    )


def mistral(config: Config, name: str) -> Decoder:
    plain = llama(config, name)
    return replace(plain, layers=(LayerKind(window=config.get("sliding_window")),) * len(plain.layers))


def phi3(config: Config, name: str) -> Decoder:
    plain = llama(config, name, LayerForm(sites=JOINED))
    return replace(plain, layers=(LayerKind(window=read_window(config)),) * len(plain.layers))


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


SLIDING, FULL = "sliding_attention", "full_attention"
NORMS = NormModules(
    before_attention="input_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma3(config: Config, name: str) -> Decoder:
    form = LayerForm(
        norms=NORMS,
        norm_weight="one_plus",
        activation=ACTIVATIONS.get(config.get("hidden_activation", "gelu_pytorch_tanh")),
        has_qkv_bias=bool(config.get("attention_bias", False)),
        has_head_norms=True,
    )
    sizes, window = read_sizes(config, name, form), read_window(config)
    types = config.get("layer_types") or [FULL] * sizes.num_layers
    kinds = sorted(set(types))
    return Decoder(
        family="gemma3_text",
        sizes=sizes,
        layers=tuple(LayerKind(window if kind == SLIDING else None, kinds.index(kind)) for kind in types),
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        rotaries=tuple(read_rotary(config, kind) for kind in kinds),
        embedding_scale=sizes.hidden**0.5,
    )


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
