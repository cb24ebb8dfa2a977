"""The input embedding and the output head of a model, as adapters with rows of their own see them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.adapters.token_rows import INPUT_ROWS, OUTPUT_ROWS, RowsShape
from weft.data.tokens.tokenise import new_token_ids, with_new_tokens
from weft.errors import ConfigError
from weft.methods.lora.own_rows import OwnRows
from weft.model.model_part import TIED, ModelPart
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Embeddings:
    """Where both are, and which of their rows an adapter has of its own."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, part: ModelPart | None = None) -> None:
        """`part`: what of a whole model it is, if not all."""
        self._tokenizer = tokenizer
        inputs: Any = model.get_input_embeddings()
        outputs: Any = model.get_output_embeddings()
        named = {module: path for path, module in model.named_modules()}
        self.paths = {INPUT_ROWS: named[inputs], OUTPUT_ROWS: named[outputs]}
        """Of the two modules, by the name of their rows."""
        self._modules = {INPUT_ROWS: inputs, OUTPUT_ROWS: outputs}
        self.is_tied: bool = getattr(model, TIED, inputs.weight is outputs.weight)
        """Whether both have the same rows, here or in the whole model."""
        is_here = {INPUT_ROWS: part is None or part.is_first, OUTPUT_ROWS: part is None or part.is_last}
        self._here = {name for name, here in is_here.items() if here}

    @property
    def input_scale(self) -> float:
        """What the model multiplies its embeddings by as it looks them up."""
        inputs = self._modules[INPUT_ROWS]
        scale = getattr(inputs, "embed_scale", None)
        return 1.0 if scale is None else float(torch.as_tensor(scale).to(inputs.weight.dtype))

    def shapes(self, spec: AdapterSpec) -> dict[str, RowsShape]:
        """The rows that an adapter has of its own, by their names; ConfigError if the model has no such rows.

        Of a part of a model they are those of the whole.
        """
        own = self._resolved(spec)
        self._check(own, spec)
        found = {}
        for name, ids, is_whole in (
            (INPUT_ROWS, own.inputs, own.all_inputs),
            (OUTPUT_ROWS, own.outputs, own.all_outputs),
        ):
            if ids is not None or is_whole:
                weight_VD = self._modules[name].weight
                num_known = len(self._tokenizer) if spec.new_tokens else weight_VD.shape[0]
                is_tied = self.is_tied and name == INPUT_ROWS and not is_whole and not own.all_outputs
                array = None if ids is None else np.array(ids, dtype=np.int64)
                ends = (INPUT_ROWS, OUTPUT_ROWS) if is_tied else (name,)
                found[name] = RowsShape(array, weight_VD, num_known, ends)
        return found

    def shapes_here(self, spec: AdapterSpec) -> dict[str, RowsShape]:
        """The same as far as they stand in this part of the model; the ends of tied rows may be in two."""
        found = {}
        for name, shape in self.shapes(spec).items():
            ends = tuple(end for end in shape.ends if end in self._here)
            if ends:
                found[name] = dataclasses.replace(shape, ends=ends)
        return found

    def _resolved(self, spec: AdapterSpec) -> OwnRows:
        """The rows with those of new tokens; the rows of a tied head are those of the embedding."""
        own, new = spec.own_rows, new_token_ids(self._tokenizer, spec.new_tokens)
        if self.is_tied and own.outputs is not None:
            if own.outputs != own.inputs:
                raise ConfigError(
                    "the output head is tied to the input embedding; name tokens of the embedding, which are its too.",
                    where="adapter.trainable_token_indices",
                )
            own = dataclasses.replace(own, outputs=None)
        if not new:
            return own
        inputs, outputs = (tuple(dict.fromkeys([*(ids or ()), *new])) for ids in (own.inputs, own.outputs))
        return dataclasses.replace(own, inputs=inputs, outputs=None if self.is_tied else outputs)

    def _check(self, own: OwnRows, spec: AdapterSpec) -> None:
        """ConfigError for rows that no adapter can have on this model."""
        if own.all_outputs and getattr(self._modules[OUTPUT_ROWS], "bias", None) is not None:
            found = f"{self.paths[OUTPUT_ROWS]} of the backbone has a bias"
            raise ConfigError(f"{found}, which no job trains.", where="adapter.modules_to_save")
        num_rows = self._modules[INPUT_ROWS].weight.shape[0]
        if spec.new_tokens and not self._tokenizer.is_fast:
            raise ConfigError(
                "the backbone's tokenizer has no tokenizer.json, in which they are written.", where="adapter.new_tokens"
            )
        if spec.new_tokens and len(self._tokenizer) > num_rows:
            found = f"the tokenizer has {len(self._tokenizer):,} tokens and the backbone rows of {num_rows:,}"
            raise ConfigError(f"{found}; new ones would take the place of others.", where="adapter.new_tokens")
        new = new_token_ids(self._tokenizer, spec.new_tokens)
        for name, ids in ((INPUT_ROWS, own.inputs), (OUTPUT_ROWS, own.outputs)):
            beyond = [one for one in ids or () if one >= num_rows and one not in new]
            if beyond:
                raise ConfigError(
                    f"got token {beyond[0]}; {self.paths[name]} of the backbone has rows 0 to {num_rows - 1}.",
                    where="adapter.trainable_token_indices",
                    hint="New tokens are named by new_tokens.",
                )

    def tokenizer_for(self, spec: AdapterSpec) -> Any:
        """The tokenizer that is written beside an adapter: one with its new tokens, or None where it has none."""
        return with_new_tokens(self._tokenizer, spec.new_tokens) if spec.new_tokens else None

    def named(self, spec: AdapterSpec) -> AdapterSpec:
        """The same adapter in the words of this model, as its files have it."""
        own, shapes = spec.own_rows, self.shapes(spec)
        leaves = {name: path.rpartition(".")[2] for name, path in self.paths.items()}
        saved = [leaves[name] for name, whole in zip(leaves, (own.all_inputs, own.all_outputs), strict=True) if whole]
        ids = {leaves[name]: tuple(map(int, s.ids)) for name, s in shapes.items() if s.ids is not None}
        indices: Any = ids[leaves[INPUT_ROWS]] if list(ids) == [leaves[INPUT_ROWS]] else ids or None
        return dataclasses.replace(spec, trainable_token_indices=indices, modules_to_save=tuple(saved) or None)
