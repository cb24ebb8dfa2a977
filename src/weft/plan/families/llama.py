"""Llama: one kind of layer, which attends to every key before it."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.families.description import Config, Decoder, LayerKind, read_rotary, read_sizes
from weft.plan.families.layer_form import ACTIVATIONS, LayerForm


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
