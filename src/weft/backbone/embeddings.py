"""The input embedding and the output head of a model, as adapters with rows of their own see them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.adapters.token_rows import INPUT_ROWS, OUTPUT_ROWS, RowsShape
from weft.errors import ConfigError
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Embeddings:
    """Where both are, and which of their rows an adapter has of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        inputs: Any = model.get_input_embeddings()
        outputs: Any = model.get_output_embeddings()
        named = {module: path for path, module in model.named_modules()}
        self.paths = {INPUT_ROWS: named[inputs], OUTPUT_ROWS: named[outputs]}
        """Of the two modules, by the name of their rows."""
        self._modules = {INPUT_ROWS: inputs, OUTPUT_ROWS: outputs}
        self.is_tied = inputs.weight is outputs.weight
        """Whether both have the same rows."""

    @property
    def input_scale(self) -> float:
        """What the model multiplies its embeddings by as it looks them up."""
        inputs = self._modules[INPUT_ROWS]
        scale = getattr(inputs, "embed_scale", None)
        return 1.0 if scale is None else float(torch.as_tensor(scale).to(inputs.weight.dtype))

    def shapes(self, spec: AdapterSpec) -> dict[str, RowsShape]:
        """The rows that an adapter has of its own, by their names; ConfigError if the model has no such rows."""
        own, found = spec.own_rows, {}
        if own.all_outputs and getattr(self._modules[OUTPUT_ROWS], "bias", None) is not None:
            name = self.paths[OUTPUT_ROWS]
            raise ConfigError(
                f"{name} of the backbone has a bias, which no job trains.", where="adapter.modules_to_save"
            )
        outputs = own.outputs
        if self.is_tied and outputs is not None:
            if outputs != own.inputs:
                raise ConfigError(
                    "the output head is tied to the input embedding; name tokens of the embedding, which are its too.",
                    where="adapter.trainable_token_indices",
                )
            outputs = None
        for name, ids, is_whole in (
            (INPUT_ROWS, own.inputs, own.all_inputs),
            (OUTPUT_ROWS, outputs, own.all_outputs),
        ):
            if ids is not None or is_whole:
                is_tied = self.is_tied and name == INPUT_ROWS and not is_whole and not own.all_outputs
                found[name] = RowsShape(self._checked(name, ids), self._modules[name].weight, is_tied)
        return found

    def _checked(self, name: str, ids: tuple[int, ...] | None) -> np.ndarray | None:
        """The ids as an array; None: all rows."""
        num_rows = self._modules[name].weight.shape[0]
        if ids is not None and max(ids) >= num_rows:
            raise ConfigError(
                f"got token {max(ids)}; {self.paths[name]} of the backbone has rows 0 to {num_rows - 1}.",
                where="adapter.trainable_token_indices",
            )
        return None if ids is None else np.array(ids, dtype=np.int64)

    def named(self, spec: AdapterSpec) -> AdapterSpec:
        """The same adapter in the words of this model, as its files have it."""
        own, shapes = spec.own_rows, self.shapes(spec)
        leaves = {name: path.rpartition(".")[2] for name, path in self.paths.items()}
        saved = [leaves[name] for name, whole in zip(leaves, (own.all_inputs, own.all_outputs), strict=True) if whole]
        ids = {leaves[name]: tuple(map(int, s.ids)) for name, s in shapes.items() if s.ids is not None}
        only_inputs = own.inputs if list(ids) == [leaves[INPUT_ROWS]] else None
        indices: Any = only_inputs or ids or None
        return dataclasses.replace(spec, trainable_token_indices=indices, modules_to_save=tuple(saved) or None)
