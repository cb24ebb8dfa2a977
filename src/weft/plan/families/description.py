"""The description of one decoder: its sizes, the form of its layers, and the numbers around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.errors import ModelError
from weft.plan.families.layer_form import LayerForm

Config = Mapping[str, Any]
"""A transformers configuration, as in its `to_dict()` or config.json."""


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of one decoder, and the form of its layers."""

    name: str
    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    """True if the output head is the embedding."""
    form: LayerForm = LayerForm()

    @property
    def attention_width(self) -> int:
        """Features of the attention's output."""
        return self.num_heads * self.head_size

    @property
    def qkv_width(self) -> int:
        """Features of q, k and v together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @cached_property
    def sites(self) -> tuple[tuple[str, ...], ...]:
        """The linears of a layer that read the same input, by their own names."""
        return tuple(tuple(name.rpartition(".")[2] for name in site) for site in self.form.sites)

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's linears, in the layer's order."""
        key_value = self.num_kv_heads * self.head_size
        parts = ((self.attention_width, key_value, key_value), (self.hidden,), (self.ffn, self.ffn), (self.hidden,))
        inputs = (self.hidden, self.attention_width, self.hidden, self.ffn)
        result = {}
        for names, sizes, num_in in zip(self.sites, parts, inputs, strict=True):
            # One module may be a whole site already.
            outs = sizes if len(names) == len(sizes) else (sum(sizes),)
            result.update({name: (num_out, num_in) for name, num_out in zip(names, outs, strict=True)})
        return result


@dataclass(frozen=True)
class Rotary:
    """The rotary positions of one kind of layer."""

    kind: str = ""
    """Kind of layer in transformers' terms; empty where all layers are of one."""
    scaling: str = "default"
    """Its `rope_type`."""
    share: float = 1.0
    """Fraction of a head's numbers that are rotated."""


@dataclass(frozen=True)
class LayerKind:
    """The attributes that differ from layer to layer."""

    window: int | None = None
    """Keys that a query attends to; None: all before it."""
    rotary: int = 0
    """Index of its rotary positions in `Decoder.rotaries`."""


@dataclass(frozen=True)
class Decoder:
    """The description of a decoder for the fast path, the memory model and the time model."""

    family: str
    sizes: DecoderSizes
    layers: tuple[LayerKind, ...]
    attention_scale: float
    rotaries: tuple[Rotary, ...] = (Rotary(),)
    embedding_scale: float | None = None
    """Factor of the embeddings, in their own type."""


def read_sizes(config: Config, name: str, form: LayerForm) -> DecoderSizes:
    """The sizes in a configuration; `name` is the user's name of the model."""
    where = name or str(config.get("model_type") or "config")
    heads, hidden = _size(config, "num_attention_heads", where), _size(config, "hidden_size", where)
    return DecoderSizes(
        name=name or str(config.get("_name_or_path") or config.get("model_type", "")),
        hidden=hidden,
        ffn=_size(config, "intermediate_size", where),
        num_layers=_size(config, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", where, heads),
        head_size=_size(config, "head_dim", where, hidden // heads),
        vocabulary=_size(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        form=form,
    )


def read_rotary(config: Config, kind: str = "") -> Rotary:
    """The rotary positions of one kind of layer."""
    rope = config.get("rope_parameters") or {}
    rope = (rope.get(kind) or {}) if kind else rope
    return Rotary(kind, str(rope.get("rope_type", "default")), float(rope.get("partial_rotary_factor", 1.0)))


def read_window(config: Config) -> int | None:
    """Keys that a query attends to in layers with a window; None where it is wider than any sample."""
    window: int | None = config.get("sliding_window")
    return None if window is None or window >= config.get("max_position_embeddings", 2**31) else window


def _size(config: Config, key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        problem = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{key} {problem}; a decoder's configuration has it as a positive whole number.", where=where)
    return value
