"""Decoder families on the fast path: the structure of their layers, as plain data that needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

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
    Rotary,
    read_rotary,
    read_sizes,
    read_window,
)
from weft.plan.weights import FINAL_NORMS, WEIGHTS, estimated_sizes, num_experts


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
    return _by_types(config, name, LayerForm(has_qkv_bias=True))


def qwen3(config: Config, name: str) -> Decoder:
    bias = bool(config.get("attention_bias", False))
    return _by_types(config, name, LayerForm(has_qkv_bias=bias, head_norm="each"))


def _by_types(config: Config, name: str, form: LayerForm) -> Decoder:
    plain = llama(config, name, form)
    kinds = config.get("layer_types") or [FULL] * len(plain.layers)
    window = config.get("sliding_window")
    return replace(plain, layers=tuple(LayerKind(window if kind == SLIDING else None) for kind in kinds))


def smollm3(config: Config, name: str) -> Decoder:
    """Every fourth layer has no rotary positions."""
    plain = _by_types(config, name, LayerForm(has_qkv_bias=bool(config.get("attention_bias", False))))
    interval = config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(len(plain.layers))]
    layers = tuple(replace(kind, rotary=0 if has else 1) for kind, has in zip(plain.layers, rotates, strict=False))
    return replace(plain, layers=layers, rotaries=(*plain.rotaries, Rotary(is_none=True)))


def olmo3(config: Config, name: str) -> Decoder:
    """Norms only after blocks, and of all heads of q or k at once."""
    form = LayerForm(
        norms=NormModules(None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
        norm_weight="exact_factor",
        has_qkv_bias=bool(config.get("attention_bias", False)),
        head_norm="all",
    )
    plain = llama(config, name, form)
    return replace(plain, **_kinds(config, len(plain.layers), config.get("sliding_window")))


def ministral3(config: Config, name: str) -> Decoder:
    """Queries are stretched at positions beyond those of the first training."""
    plain = mistral(config, name)
    rope = config.get("rope_parameters") or {}
    stretch = float(rope.get("llama_4_scaling_beta") or 0.0), int(rope.get("original_max_position_embeddings") or 1)
    return replace(plain, rotaries=(replace(plain.rotaries[0], stretch=stretch if stretch[0] else None),))


def granite(config: Config, name: str, form: LayerForm | None = None) -> Decoder:
    """Llama with factors of the first layer's input, of scores and of blocks' results."""
    form = form or LayerForm(has_qkv_bias=bool(config.get("attention_bias", False)))
    factors = {key: float(config.get(key) or 1.0) for key in ("embedding_multiplier", "residual_multiplier")}
    plain = llama(config, name, replace(form, scales_results=factors["residual_multiplier"] != 1.0))
    return replace(
        plain,
        attention_scale=float(config.get("attention_multiplier") or 1.0),
        input_scale=factors["embedding_multiplier"],
        residual_scale=factors["residual_multiplier"] if plain.sizes.form.scales_results else None,
    )


_GRANITE_MLP = (("shared_mlp.input_linear",), ("shared_mlp.output_linear",))


def granite_hybrid(config: Config, name: str) -> Decoder:
    """The dense models of Granite 4; those with other layers or experts are described like them, for estimates."""
    bias = bool(config.get("attention_bias", False))
    sites = (*SEPARATE[:2], *_GRANITE_MLP)
    ffn = config.get("shared_intermediate_size") or config.get("intermediate_size")
    plain = granite({**config, "intermediate_size": ffn}, name, LayerForm(sites=sites, has_qkv_bias=bias))
    has_rotary = config.get("position_embedding_type") == "rope"
    return plain if has_rotary else replace(plain, rotaries=(Rotary(is_none=True),))


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
        head_norm="each",
    )
    sizes = read_sizes(config, name, form)
    return Decoder(
        family="gemma3_text",
        sizes=sizes,
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        embedding_scale=sizes.hidden**0.5,
        **_kinds(config, sizes.num_layers, read_window(config)),
    )


def _kinds(config: Config, num_layers: int, window: int | None) -> dict[str, Any]:
    """The layers and rotary positions of a decoder whose kinds of layer have their own."""
    types = config.get("layer_types") or [FULL] * num_layers
    kinds = sorted(set(types))
    return {
        "layers": tuple(LayerKind(window if kind == SLIDING else None, kinds.index(kind)) for kind in types),
        "rotaries": tuple(read_rotary(config, kind) for kind in kinds),
    }


FAMILIES: Mapping[str, Callable[[Config, str], Decoder]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi3": phi3,
    "gemma3_text": gemma3,
    "smollm3": smollm3,
    "olmo3": olmo3,
    "ministral3": ministral3,
    "granite": granite,
    "granitemoehybrid": granite_hybrid,
}
"""Functions that describe a decoder, by transformers' model type."""
REFERENCE_FAMILIES = (
    "gemma2",
    "opt",
    "gpt_neox",
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
    "gemma4_text",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "mamba2",
)
"""Model types that run on the reference path and are tested against PEFT as those of the fast path are; any other is
checked against its own attention when it is loaded."""
ROTARY_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
"""Rotary positions that do not depend on the length of a sample; longrope's do beyond `Backbone.max_positions`."""
LINEARS = tuple(dict.fromkeys(path.rpartition(".")[2] for site in (*SEPARATE, *JOINED, *_GRANITE_MLP) for path in site))
"""Names of the linears of a layer in any family."""


SPARED = ("gate", "router", "router.proj", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
"""Linears that `all-linear` leaves out: routers, gates of width 1, and the decays and strengths of a gated delta net's
heads."""
_NOT_IN_PEFT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), ("out_proj",)),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next"), ("gate_proj", "up_proj", "down_proj")),
}
"""Names of linears by model type that PEFT refuses, or takes for the routed experts'."""


def spared(family: str) -> tuple[str, ...]:
    """Names of the linears that `all-linear` leaves out. An adapter that names them has them."""
    return (*SPARED, *_NOT_IN_PEFT.get(family, ()))


def describe(config: Config, name: str = "") -> Decoder:
    """The decoder in a transformers configuration; others are described like Llama, for estimates."""
    # Models with images or audio have their decoder's settings one level down.
    config = config.get("text_config") or config
    kind = str(config.get("model_type", ""))
    if kind in WEIGHTS and not is_described(config):
        sizes = estimated_sizes(config, name)
        return Decoder(kind, sizes, (LayerKind(),) * sizes.num_layers, sizes.head_size**-0.5)
    return FAMILIES.get(kind, llama)(config, name)


def estimate_note(config: Config) -> str | None:
    """Note on how time and memory are estimated for a model that `describe` does not describe exactly."""
    kind = str(config.get("model_type", ""))
    if is_described(config):
        return None
    is_counted = kind in WEIGHTS
    what = "the time of" if is_counted else "time and weights of"
    like = "with as many weights for a token" if is_counted else "of the same sizes"
    return f"{what} {kind} is that of a Llama {like} on the fast path, which it does not take: expect less speed."


def is_described(config: Config) -> bool:
    """True if `describe` gives the very layers of a model: those of a family here, all dense and with attention."""
    kinds = set(config.get("layer_types") or ()) - {FULL, SLIDING, "attention"}
    return config.get("model_type") in FAMILIES and not (kinds or config.get("num_local_experts"))


def takes_tensor(config: Config) -> bool:
    """True if tensor parallel knows how to divide the layers of a model."""
    if not is_described(config):
        return False
    form = describe(config).sizes.form
    return form.sites == SEPARATE and form.head_norm != "all"


def final_norm(config: Config) -> str | None:
    """Name of the norm after the last layer; None for models whose layers cannot be divided over devices."""
    if is_described(config):
        return "norm"
    return None if _reads_elsewhere(config) else FINAL_NORMS.get(str(config.get("model_type", "")))


def why_one_piece(config: Config) -> str:
    """Reason why the layers of a model without `final_norm` cannot be on several devices."""
    kind = str(config.get("model_type", ""))
    if kind in FINAL_NORMS:
        return f"is a {kind} model whose layers {_reads_elsewhere(config)}; they stay on one device"
    return (
        f"is a {kind} model; stages and shards are for those of {', '.join(dict.fromkeys((*FAMILIES, *FINAL_NORMS)))}"
    )


def _reads_elsewhere(config: Config) -> str | None:
    """Words about what the layers of a model read besides the rows that enter them."""
    parts = {
        "hidden_size_per_layer_input": "have embeddings of their own",
        "num_kv_shared_layers": "reuse keys and values of earlier ones",
    }
    return " and ".join(text for key, text in parts.items() if config.get(key)) or None


_NO_KERNELS: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_5_text", "lfm2", "bamba", "falcon_h1", "mamba2", "nemotron_h"), "layers with a state"),
    "gemma4_text": "heads of unlike sizes",
}


def why_unsupported(config: Config) -> str | None:
    """Reason why the fast path does not take the model of a transformers configuration; None if it does."""
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        missing = "routed experts" if num_experts(config) else _NO_KERNELS.get(kind)
        if missing is not None:
            return f"the fast path has no kernels for {missing}"
        return f"{kind} is not among {', '.join(FAMILIES)}"
    if not is_described(config):
        return f"only dense {kind} models with attention in every layer have kernels"
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
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "mamba",
    "minimax",
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
}


_DIVIDED = ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid")
_MULTIPLIED = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "cohere_compass": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}


def logit_scale(family: str, config: Config) -> float | None:
    """The factor between the output head's product and the logits; None if there is none."""
    if family in _DIVIDED:
        return 1.0 / float(config["logits_scaling"])
    if family in _MULTIPLIED:
        return float(config[_MULTIPLIED[family]])
    return None
