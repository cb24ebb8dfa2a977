"""What follows from the sizes of a backbone: parameters, FLOPs, bytes.

Per layer and token, forward: 2 FLOP per weight of its linears; attention 4 · heads · head size FLOP per (query, key)
pair, of which a causal sample of n tokens has n (n + 1) / 2. Nothing here knows a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from weft.errors import ConfigError, closest
from weft.plan.families.description import Config, DecoderSizes
from weft.plan.families.registry import LINEARS, describe

ALL_LINEAR = "all-linear"


class ModelShape(DecoderSizes):
    """The sizes of one decoder, with all that is counted of them."""

    @staticmethod
    def from_config(config: Config, name: str = "") -> ModelShape:
        """The shape in a transformers configuration, as its `to_dict()` or config.json gives it."""
        sizes = describe(config, name).sizes
        return ModelShape(**{field.name: getattr(sizes, field.name) for field in fields(sizes)})

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's linears."""
        return sum(num_out * num_in for num_out, num_in in self.linears.values())

    @property
    def layer_extras(self) -> int:
        """A layer's norms and biases: never quantised."""
        biases = self.qkv_width if self.form.has_qkv_bias else 0
        head_norms = 2 * self.head_size if self.form.has_head_norms else 0
        return len(self.form.norms.names) * self.hidden + biases + head_norms

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
        names = self.chosen(targets)
        return self.num_layers * rank * sum(sum(self.linears[name]) for name in names)

    def chosen(self, targets: str | Sequence[str]) -> tuple[str, ...]:
        """The linears of a layer that `target_modules` names, in the layer's order."""
        return chosen_linears(targets, tuple(self.linears))

    def attention_flop(self, lengths: Sequence[int]) -> float:
        """Of one layer, forward, over causal samples of these lengths."""
        return 4.0 * self.attention_width * causal_pairs(lengths)


def causal_pairs(lengths: Sequence[int]) -> float:
    """(query, key) pairs inside causal samples."""
    return sum(n * (n + 1) for n in lengths) / 2


def chosen_linears(targets: str | Sequence[str], known: Sequence[str] = LINEARS) -> tuple[str, ...]:
    """The linears that `target_modules` names among those known, in their order; by default those of any family."""
    if isinstance(targets, str):
        if targets in (ALL_LINEAR, "all"):
            return tuple(known)
        targets = (targets,)
    for name in targets:
        if name not in known:
            guess = closest(name, list(known))
            raise ConfigError(
                f"a layer has no linear {name!r}; it has {', '.join(known)}.",
                where="target_modules",
                hint=f"Did you mean {guess}?" if guess else None,
            )
    return tuple(name for name in known if name in targets)


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
