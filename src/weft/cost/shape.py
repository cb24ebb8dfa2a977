"""The sizes of a backbone, and what follows from them: parameters, FLOPs, bytes.

Of a decoder whose layers are norm, attention, norm, gated MLP. Per layer and token, forward: 2 FLOP per weight of its
seven linears; attention 4 · heads · head size FLOP per (query, key) pair, of which a causal sample of n tokens has
n (n + 1) / 2. Nothing here knows a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError, ModelError, closest

SITES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
"""Linears that read the same input, in the order of a layer."""
LINEARS = tuple(name for site in SITES for name in site)
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one decoder."""

    name: str
    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    """The output head is the embedding."""
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    """q and k are normed head by head; their raw values are then kept for the way back."""

    @staticmethod
    def from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
        """The shape in a transformers configuration, as its `to_dict()` or config.json gives it."""
        # Models that also see or hear keep their decoder's sizes one level down.
        config = config.get("text_config") or config
        where = name or str(config.get("model_type") or "config")
        heads = _size(config, "num_attention_heads", where)
        hidden = _size(config, "hidden_size", where)
        family = str(config.get("model_type", ""))
        return ModelShape(
            name or str(config.get("_name_or_path") or family),
            hidden,
            _size(config, "intermediate_size", where),
            _size(config, "num_hidden_layers", where),
            heads,
            _size(config, "num_key_value_heads", where, heads),
            _size(config, "head_dim", where, hidden // heads),
            _size(config, "vocab_size", where),
            bool(config.get("tie_word_embeddings", False)),
            bool(config.get("attention_bias", family == "qwen2")),
            family in ("qwen3", "gemma3_text"),
        )

    @property
    def attention_width(self) -> int:
        """Features of the attention's output."""
        return self.num_heads * self.head_size

    @property
    def qkv_width(self) -> int:
        """Features of q, k and v together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's linears."""
        kv = self.num_kv_heads * self.head_size
        return {
            "q_proj": (self.attention_width, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, self.attention_width),
            "gate_proj": (self.ffn, self.hidden),
            "up_proj": (self.ffn, self.hidden),
            "down_proj": (self.hidden, self.ffn),
        }

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's linears."""
        return sum(num_out * num_in for num_out, num_in in self.linears.values())

    @property
    def layer_extras(self) -> int:
        """A layer's norms and biases: never quantised."""
        biases = self.qkv_width if self.has_qkv_bias else 0
        return 2 * self.hidden + biases + (2 * self.head_size if self.has_head_norms else 0)

    @property
    def head_weights(self) -> int:
        """Weights of the output head."""
        return self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        """All of them, as the model's own count."""
        embeddings = self.head_weights * (1 if self.tied else 2)
        return self.num_layers * (self.layer_weights + self.layer_extras) + embeddings + self.hidden

    def adapter_parameters(self, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
        """Trainable numbers of a LoRA adapter on the named linears of every layer."""
        names = chosen_linears(targets)
        return self.num_layers * rank * sum(sum(self.linears[name]) for name in names)

    def attention_flop(self, lengths: Sequence[int]) -> float:
        """Of one layer, forward, over causal samples of these lengths."""
        return 4.0 * self.attention_width * causal_pairs(lengths)


def causal_pairs(lengths: Sequence[int]) -> float:
    """(query, key) pairs inside causal samples."""
    return sum(n * (n + 1) for n in lengths) / 2


def chosen_linears(targets: str | Sequence[str]) -> tuple[str, ...]:
    """The linears of a layer that `target_modules` names, in the layer's order."""
    if isinstance(targets, str):
        if targets in (ALL_LINEAR, "all"):
            return LINEARS
        targets = (targets,)
    for name in targets:
        if name not in LINEARS:
            guess = closest(name, list(LINEARS))
            raise ConfigError(
                f"a layer has no linear {name!r}; it has {', '.join(LINEARS)}.",
                where="target_modules",
                hint=f"Did you mean {guess}?" if guess else None,
            )
    return tuple(name for name in LINEARS if name in targets)


def stage_layers(num_layers: int, num_stages: int, chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of every stage: as chosen, or as equal as can be, with fewer on the last stages, which have the head."""
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(f"got {num_stages} for {num_layers} layers; every stage needs a layer.", where="num_stages")
    if chosen is None:
        return tuple(math.ceil((num_layers - stage) / num_stages) for stage in range(num_stages))
    if len(chosen) != num_stages or sum(chosen) != num_layers or min(chosen) < 1:
        raise ConfigError(
            f"got {list(chosen)} for {num_layers} layers on {num_stages} stages; name at least 1 for each, all in all "
            f"{num_layers}.",
            where="split",
        )
    return tuple(chosen)


def _size(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{key} {found}; a decoder's configuration has it as a positive whole number.", where=where)
    return value
