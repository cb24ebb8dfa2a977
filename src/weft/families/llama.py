"""Llama: one kind of layer, which sees every key before it."""

from __future__ import annotations

from weft.families.description import Config, Decoder, LayerKind, read_rotary, read_sizes
from weft.families.layer_form import LayerForm


def llama(config: Config, name: str, form: LayerForm | None = None) -> Decoder:
    """The decoder in a configuration; families that differ in the form of their layers alone give theirs."""
    bias, activation = bool(config.get("attention_bias", False)), str(config.get("hidden_act", "silu"))
    sizes = read_sizes(config, name, form or LayerForm(activation=activation, has_qkv_bias=bias))
    return Decoder(
        family=str(config.get("model_type", "llama")),
        sizes=sizes,
        layers=(LayerKind(),) * sizes.num_layers,
        attention_scale=sizes.head_size**-0.5,
        rotaries=(read_rotary(config),),
    )
