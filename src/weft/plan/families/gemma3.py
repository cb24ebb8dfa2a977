"""Gemma 3, the text decoder: norms around both blocks, GELU, head norms, and windows on most layers.

Layers with a window and those without have different rotary positions.
"""

from __future__ import annotations

from weft.plan.families.description import Config, Decoder, LayerKind, read_rotary, read_sizes, read_window
from weft.plan.families.layer_form import ACTIVATIONS, LayerForm, NormModules

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
