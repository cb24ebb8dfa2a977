"""Weights of families whose layers have states, experts or other attention, counted without their modules.

Time and memory models know layers of one kind. So such a model is planned like a Llama whose layers have as many
weights as a token uses of its own on average. All others, such as routed experts that a token does not use, count as
memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import ModelError
from weft.plan.decoder import Config, DecoderSizes, LayerForm, read_sizes

STATE, ATTENTION, CONVOLUTION = "linear_attention", "full_attention", "conv"
"""Kinds of layers in a configuration that transformers has read."""


@dataclass(frozen=True)
class Weights:
    used: int
    """Weights that are multiplied with each token."""
    idle: int = 0
    """Weights of the other routed experts, and rows of embeddings for each layer."""

    def with_mixer(self, mixer: int) -> Weights:
        return Weights(self.used + mixer, self.idle)


def _attention(config: Config, *, gates: int = 0) -> int:
    """`gates`: 1 if queries come with as many numbers that gate the output."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    key_value = config.get("num_key_value_heads") or heads
    return int(hidden * size * ((2 + gates) * heads + 2 * key_value))


def _feed_forward(config: Config) -> Weights:
    return Weights(3 * config["hidden_size"] * config["intermediate_size"])


def num_experts(config: Config) -> int:
    """Number of routed experts in a layer; 0 if there are none."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(config[key]) for key in counts if config.get(key)), 0)


def num_chosen(config: Config) -> int:
    """Number of routed experts that each token uses."""
    return min(num_experts(config), int(config.get("num_experts_per_tok") or config["top_k_experts"]))


def _experts(config: Config, shared: int = 0) -> Weights:
    """Gated experts, with the router and a shared expert of that width."""
    hidden, count, chosen = config["hidden_size"], num_experts(config), num_chosen(config)
    each = 3 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
    return Weights(chosen * each + 3 * hidden * shared + count * hidden, (count - chosen) * each)


def _mixture(config: Config) -> list[Weights]:
    """Attention in all layers, experts in most of them."""
    experts = _experts(config, config.get("shared_expert_intermediate_size") or 0)
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    after = [_feed_forward(config) if i in dense or (i + 1) % every else experts for i in layers]
    return [own.with_mixer(_attention(config)) for own in after]


def _deepseek(config: Config) -> list[Weights]:
    """Layers of experts after some dense ones; attention may be latent (MLA)."""
    num_layers, num_dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    kinds = config.get("mlp_layer_types") or ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    experts = _experts(config, config["n_shared_experts"] * config["moe_intermediate_size"])
    mixer = _latent_attention(config) if config.get("kv_lora_rank") else _attention(config)
    return [(experts if kind == "sparse" else _feed_forward(config)).with_mixer(mixer) for kind in kinds]


def _latent_attention(config: Config) -> int:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rotated, plain, value = (config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query_rank, query = config.get("q_lora_rank"), heads * (rotated + plain)
    queries = hidden * query if query_rank is None else query_rank * (hidden + query)
    return int(queries + hidden * (rank + rotated) + rank * heads * (plain + value) + heads * value * hidden)


def _gemma4(config: Config) -> list[Weights]:
    """Layers differ in their heads; the last ones may have no keys and values of their own."""
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    experts = _experts(config) if config.get("enable_moe_block") else Weights(0)
    per_layer, num_sharing = config.get("hidden_size_per_layer_input") or 0, config.get("num_kv_shared_layers") or 0
    others = {int(layer): own for layer, own in (config.get("per_layer_config") or {}).items()}
    found = []
    for layer, kind in enumerate(config["layer_types"]):
        own = {**config, **others.get(layer, {})}
        is_sharing = layer >= num_layers - num_sharing > 0
        heads = 2 * own["num_attention_heads"]
        if not is_sharing:
            heads += own["num_key_value_heads"] * (1 if config.get("attention_k_eq_v") and kind == ATTENTION else 2)
        ffn = config["intermediate_size"] * (2 if is_sharing and config.get("use_double_wide_mlp") else 1)
        # The layer's gate and projection of its own embedding, and its share of the projection of all of them.
        used = hidden * (heads * own["head_dim"] + 3 * ffn + 3 * per_layer) + experts.used
        found.append(Weights(used, experts.idle + per_layer * (config.get("vocab_size_per_layer_input") or 0)))
    return found


def _qwen3_5(config: Config) -> list[Weights]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    mixers = {STATE: hidden * (2 * keys + 3 * values + 2 * heads), ATTENTION: _attention(config, gates=1)}
    has_experts = config.get("num_experts")
    after = _experts(config, config["shared_expert_intermediate_size"]) if has_experts else _feed_forward(config)
    return [after.with_mixer(mixers[kind]) for kind in config["layer_types"]]


def adjusted_width(config: Config) -> int | None:
    """The width of a dense feed-forward block where the configuration only leads to it (LFM2); else None."""
    if not config.get("block_auto_adjust_ff_dim"):
        return None
    width, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
    return int(-(-int(config["block_ffn_dim_multiplier"] * width) // multiple) * multiple)


def _lfm2(config: Config) -> list[Weights]:
    mixers = {CONVOLUTION: 4 * config["hidden_size"] ** 2, ATTENTION: _attention(config)}
    width = adjusted_width(config) or config["intermediate_size"]
    after = [_feed_forward({**config, "intermediate_size": width})] * len(config["layer_types"])
    if config.get("num_experts"):
        after[config["num_dense_layers"] :] = [_experts(config)] * (len(after) - config["num_dense_layers"])
    return [own.with_mixer(mixers[kind]) for own, kind in zip(after, config["layer_types"], strict=True)]


def _mamba(config: Config, inner: int, groups: int, state: int, heads: int) -> int:
    return int(config["hidden_size"] * (3 * inner + 2 * groups * state + heads))


def _named_mamba(config: Config, inner: int | None = None) -> int:
    """Weights of Mamba layers, from the settings that most families have."""
    width = int(config["mamba_expand"] * config["hidden_size"]) if inner is None else inner
    return _mamba(config, width, config["mamba_n_groups"], config["mamba_d_state"], config["mamba_n_heads"])


def _granite_hybrid(config: Config) -> list[Weights]:
    mixers = {STATE: _named_mamba(config), ATTENTION: _attention(config)}
    after = _experts(config, config["shared_intermediate_size"])
    return [after.with_mixer(mixers[kind]) for kind in config["layer_types"]]


def _nemotron_h(config: Config) -> list[Weights]:
    """One block in each layer."""
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    latent, count = config.get("moe_latent_size") or 0, config["n_routed_experts"]
    chosen, expert = config["num_experts_per_tok"], 2 * (latent or hidden) * config["moe_intermediate_size"]
    shared = config["n_shared_experts"] * config["moe_shared_expert_intermediate_size"]
    mamba = _mamba(config, heads * config["mamba_head_dim"], config["n_groups"], config["ssm_state_size"], heads)
    weights = {
        STATE: Weights(mamba),
        ATTENTION: Weights(_attention(config)),
        "mlp": Weights(2 * hidden * config["intermediate_size"]),
        "moe": Weights(chosen * expert + 2 * hidden * (shared + latent) + hidden * count, (count - chosen) * expert),
    }
    return [weights[kind] for kind in config["layers_block_type"]]


def _bamba(config: Config) -> list[Weights]:
    with_attention, after = set(config.get("attn_layer_indices") or ()), _feed_forward(config)
    mixers = (_named_mamba(config), _attention(config))
    return [after.with_mixer(mixers[layer in with_attention]) for layer in range(config["num_hidden_layers"])]


def _falcon_h1(config: Config) -> list[Weights]:
    both = _attention(config) + _named_mamba(config, config.get("mamba_d_ssm"))
    return [_feed_forward(config).with_mixer(both)] * int(config["num_hidden_layers"])


def _mamba2(config: Config) -> list[Weights]:
    inner = int(config["expand"] * config["hidden_size"])
    own = _mamba(config, inner, config["n_groups"], config["state_size"], config["num_heads"])
    return [Weights(own)] * int(config["num_hidden_layers"])


WEIGHTS: Mapping[str, Callable[[Config], Sequence[Weights]]] = {
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "qwen3_next": _qwen3_5,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "mamba2": _mamba2,
    "deepseek_v3": _deepseek,
    "glm4_moe": _deepseek,
    "glm4_moe_lite": _deepseek,
    "gpt_oss": _mixture,
    "granitemoe": _mixture,
    "mixtral": _mixture,
    "olmoe": _mixture,
    "qwen2_moe": _mixture,
    "qwen3_moe": _mixture,
    "gemma4_text": _gemma4,
}
"""Functions by model type: the weights of each layer's linears and experts in a configuration that transformers has
read."""


def estimated_sizes(config: Config, name: str) -> DecoderSizes:
    """The sizes of a Llama with the weights of such a model."""
    try:
        layers = WEIGHTS[config["model_type"]](config)
    except KeyError as missing:
        where = name or config["model_type"]
        raise ModelError(f"{missing.args[0]} is missing in its configuration.", where=where) from None
    known = {
        "num_attention_heads": 1,
        "intermediate_size": 1,
        **{key: value for key, value in config.items() if value is not None},
        "num_hidden_layers": len(layers),
    }
    sizes = read_sizes(known, name, LayerForm())
    block = sizes.hidden * (sizes.qkv_width + sizes.attention_width)
    used, idle = (sum(each) / len(layers) for each in ([w.used for w in layers], [w.idle for w in layers]))
    return replace(sizes, ffn=max(1, round((used - block) / (3 * sizes.hidden))), idle_weights=round(idle))


_MIXTURES = (
    "deepseek_v3",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
FINAL_NORMS: Mapping[str, str] = {
    **dict.fromkeys(_MIXTURES, "norm"),
    "qwen3_5_text": "norm",
    "qwen3_5_moe_text": "norm",
    "qwen3_next": "norm",
    "lfm2": "embedding_norm",
    "lfm2_moe": "embedding_norm",
    "granitemoehybrid": "norm",
    "nemotron_h": "norm_f",
    "mamba2": "norm_f",
}
"""Names of the norm after the last layer, for the families whose layers stages and shards divide."""
