"""A part of a model: some of its layers, for one stage of a pipeline.

The first part has the embedding, the last the final norm and the output head. What is not there leaves a module without
weights in its place, so that every path is that of the whole model: starting values and dropout depend on paths.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.adapters.linear_modules import linear_modules
from weft.plan.families.registry import FAMILIES

WHOLE = "weft_linears"
"""Where a part of a model keeps the paths of all linears of the whole."""
TIED = "weft_is_tied"
"""Where it keeps whether embedding and output head of the whole have the same rows."""


@dataclass(frozen=True)
class ModelPart:
    """The layers from `first` to before `end`, of so many."""

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """Whether the embedding belongs to it."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the output head belongs to it."""
        return self.end == self.num_layers


class AbsentLayer(nn.Module):
    """A layer that another part of the model has: what enters, leaves."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """The same tensor."""
        return hidden_states


class AbsentWeight(nn.Module):
    """An embedding or output head that another part of the model has; only its shape is known."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        # Not a parameter: nothing is to be loaded for it.
        self.__dict__["weight"] = torch.empty(whole.weight.shape, dtype=whole.weight.dtype, device="meta")


def keep_part(model: Any, part: ModelPart) -> None:
    """Takes out of a transformers model of `FAMILIES` all that does not belong to a part of it."""
    assert model.config.model_type in FAMILIES, "the layers of other models may be called otherwise"
    setattr(model, WHOLE, list(linear_modules(model)))
    decoder = model.base_model
    for layer in range(part.num_layers):
        if not part.first <= layer < part.end:
            decoder.layers[layer] = AbsentLayer()
    is_tied = bool(model.config.tie_word_embeddings)
    setattr(model, TIED, is_tied)
    if not part.is_first and not (part.is_last and is_tied):
        model.set_input_embeddings(AbsentWeight(model.get_input_embeddings()))
    if not part.is_last:
        decoder.norm = nn.Identity()
        model.set_output_embeddings(AbsentWeight(model.get_output_embeddings()))
        # Nothing is left that could be tied.
        model.config = decoder.config = copy.deepcopy(model.config)
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}


def plain_parameter(model: nn.Module) -> nn.Parameter:
    """One that tells where a model lives and in what it computes.

    No linear's does: those of a layer may be quantised, or on other devices.
    """
    return next(own for name, own in model.named_parameters() if ".frozen." not in name)


def take_out_linears(model: Any) -> None:
    """Takes the weights of all linears but the output head out of a transformers model; their shapes are left."""
    for linear in linear_modules(model).values():
        weight = linear._parameters.pop("weight")
        assert weight is not None
        linear.__dict__["weight"] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def model_class_of(kind: Any, reduce: Callable[[Any], None]) -> Any:
    """A transformers class whose models are made without what `reduce` takes out of them, so that it is never read."""

    def make(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        reduce(self)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})
