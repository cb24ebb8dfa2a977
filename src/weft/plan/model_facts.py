"""What users are shown of models: the README's table of families, which `python -m weft.plan.model_facts` prints, and
what one model is made of, by its configuration: the kinds of its layers, its experts, its sizes, how it is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from weft.errors import counted
from weft.plan.cost.shape import ModelShape
from weft.plan.decoder import OTHER_NAMES, Config
from weft.plan.families import (
    FAMILIES,
    FULL,
    OBSTACLES,
    REFERENCE_FAMILIES,
    SLIDING,
    final_norm,
    is_described,
    takes_tensor,
    why_unsupported,
)
from weft.plan.weights import adjusted_width, num_experts

TITLES = {
    "bailing_hybrid": "Ling hybrid",
    "bamba": "Bamba",
    "bloom": "BLOOM",
    "codegen": "CodeGen",
    "cohere": "Cohere",
    "cohere2": "Cohere 2",
    "deepseek_v3": "DeepSeek-V3",
    "falcon": "Falcon",
    "falcon_h1": "Falcon-H1",
    "falcon_mamba": "Falcon Mamba",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4",
    "glm4_moe": "GLM-4.5",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt2": "GPT-2",
    "gpt_neo": "GPT-Neo",
    "gpt_neox": "GPT-NeoX",
    "gpt_oss": "gpt-oss",
    "gptj": "GPT-J",
    "granite": "Granite 3",
    "granitemoe": "Granite MoE",
    "granitemoehybrid": "Granite 4",
    "jamba": "Jamba",
    "kimi_linear": "Kimi Linear",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "llama": "Llama",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "minimax": "MiniMax",
    "ministral3": "Ministral 3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "mpt": "MPT",
    "nemotron_h": "Nemotron 3",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3.5-MoE, 3.6-MoE",
    "qwen3_5_text": "Qwen3.5, 3.6, 3.8",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "recurrent_gemma": "RecurrentGemma",
    "rwkv": "RWKV",
    "smollm3": "SmolLM3",
    "xlstm": "xLSTM",
    "zamba": "Zamba",
    "zamba2": "Zamba2",
}
"""Names of published models by transformers' model type."""
_DENSE_ONLY = ("granitemoehybrid",)
"""Families of which only dense models take the fast path."""


def table() -> str:
    """The families by what trains them, as Markdown."""
    fast = [f"{TITLES[kind]} (dense)" if kind in _DENSE_ONLY else TITLES[kind] for kind in FAMILIES]
    rows = {
        "fast path on a GPU": fast,
        "plain torch, as exact": _titles(REFERENCE_FAMILIES),
        "not yet": _titles(OBSTACLES),
    }
    lines = [f"| {path} | {', '.join(titles)} |" for path, titles in rows.items()]
    return "\n".join(["| trained by | models |", "|---|---|", *lines, ""])


def _titles(kinds: Iterable[str]) -> list[str]:
    return sorted((TITLES[kind] for kind in kinds), key=str.lower)


_MAMBA = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h")
_SHARED = ("n_shared_experts", "shared_expert_intermediate_size", "num_shared_experts", "shared_intermediate_size")


def rooms(config: Config) -> dict[str, str]:
    """The parts of a model by name, each as a text; `config` is that of a text model."""
    return {
        "layers": _layers(config),
        "attention": _attention(config),
        "feed-forward": _feed_forward(config),
        "checked": _checked(config),
        "layouts": _layouts(config),
        "fast path": why_not_fast(config) or "yes",
    }


def why_not_fast(config: Config) -> str | None:
    reason = why_unsupported(config)
    return None if reason is None else f"no: {reason}"


def stored_as(config: Config) -> str:
    """Words about how a model's files store its weights; `config` is that of the whole model."""
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    kind = config.get("dtype") or config.get("torch_dtype") or "as in its files"
    return str(kind) if method is None else f"{method}, read into the backbone's type"


def _layers(config: Config) -> str:
    kind, num = str(config.get("model_type", "")), _size(config, "num_hidden_layers")
    types = config.get("layer_types") or config.get("layers_block_type") or ["full_attention"] * num
    state = "Mamba-2" if kind in _MAMBA else "gated delta net"
    names = {
        FULL: "full attention",
        "attention": "full attention",
        SLIDING: f"attention over {config.get('sliding_window')} tokens",
        "linear_attention": state,
        "mamba": "Mamba-2",
        "conv": "short convolution",
        "moe": "experts alone",
        "mlp": "feed-forward alone",
    }
    if kind == "mamba2":
        types = ["mamba"] * num
    found = Counter(names.get(str(each), str(each)) for each in types)
    return ", ".join(f"{count} x {name}" for name, count in found.items())


def _attention(config: Config) -> str:
    heads = _size(config, "num_attention_heads")
    if not heads or config.get("model_type") == "mamba2":
        return "none"
    size = config.get("head_dim") or _size(config, "hidden_size") // heads
    parts = [f"{heads} heads of {size}"]
    if config.get("kv_lora_rank"):
        parts = [f"{heads} latent heads (MLA) of {config.get('qk_nope_head_dim')} + {config.get('qk_rope_head_dim')}"]
    else:
        parts.append(f"{config.get('num_key_value_heads') or heads} for keys and values")
    known = {
        "num_kv_shared_layers": "the last {} layers reuse keys and values",
        "hidden_size_per_layer_input": "embeddings of {} for each layer",
    }
    own = config.get("per_layer_config") or {}
    others = sorted({each["head_dim"] for each in own.values() if "head_dim" in each} - {size})
    parts += [f"in some layers of {other}" for other in others]
    parts += [text.format(config[key]) for key, text in known.items() if config.get(key)]
    if config.get("attention_k_eq_v"):
        parts.append("values are keys in full layers")
    if config.get("model_type") == "gpt_oss":
        parts.append("sinks")
    return ", ".join(parts)


def _feed_forward(config: Config) -> str:
    num = num_experts(config)
    dense = _first(config, "shared_intermediate_size") or _size(config, "intermediate_size")
    dense = adjusted_width(config) or dense or 4 * _size(config, "hidden_size")
    if not num:
        return f"dense, {dense:,} wide"
    top = _first(config, "num_experts_per_tok", "top_k_experts")
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    shared = " and a shared one" if any(config.get(key) for key in _SHARED) else ""
    found = f"{counted(num, 'expert')} of {width:,}, {top} for each token{shared}"
    if config.get("enable_moe_block"):
        return f"{found}, beside a dense block of {dense:,}"
    first = _num_dense(config)
    return f"{found}; {counted(first, 'layer')} dense, {dense:,} wide" if first else found


def _num_dense(config: Config) -> int:
    """Layers of a mixture that have no experts but a dense block."""
    if config.get("mlp_layer_types"):
        return list(config["mlp_layer_types"]).count("dense")
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(_first(config, "num_hidden_layers"))
    first = _first(config, "first_k_dense_replace", "num_dense_layers")
    return sum(i < first or i in dense or (i + 1) % every != 0 for i in layers)


def _layouts(config: Config) -> str:
    """The layouts that divide a model; its size may refuse some numbers."""
    found = ["spread:N", *(("stages:N", "shards:N") if final_norm(config) is not None else ())]
    return ", ".join([*found, *(("tensor:N",) if takes_tensor(config) else ())])


def size_in_words(shape: ModelShape) -> str:
    """Parameters of a model, and of those the ones that a token uses if they are fewer."""
    own = _parameters(shape.num_parameters)
    used = shape.num_layers * shape.layer_weights + shape.head_weights
    return f"{own} parameters, {_parameters(used)} for a token" if shape.idle_weights else f"{own} parameters"


def _parameters(number: int) -> str:
    return f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.3g} M"


def _size(config: Config, name: str) -> int:
    return _first(config, name, *OTHER_NAMES[name])


def _first(config: Config, *keys: str) -> int:
    """The first of some settings that a configuration has; 0 if it has none."""
    return next((int(config[key]) for key in keys if config.get(key)), 0)


def _checked(config: Config) -> str:
    kind = str(config.get("model_type", ""))
    if kind in REFERENCE_FAMILIES or is_described(config):
        return f"{kind} is tested against PEFT"
    if kind in OBSTACLES:
        return f"refused: {kind} {OBSTACLES[kind]}"
    return f"{kind} is checked against its own attention when it is loaded"


if __name__ == "__main__":
    print(table(), end="")
