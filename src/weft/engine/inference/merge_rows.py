"""Puts an adapter's own rows of tokens into the embedding and the output head of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.adapters.token_rows import OUTPUT_ROWS
from weft.data.tokens.tokenise import with_new_tokens
from weft.errors import AdapterFileError, ConfigError
from weft.model.embeddings import Embeddings
from weft.store.row_files import ROWS

if TYPE_CHECKING:
    from weft.engine.inference.attach import StoredAdapter


@torch.no_grad()
def merge_rows(stored: StoredAdapter, model: Any, tokenizer: Any) -> Any:
    """Replaces the rows, and returns the tokenizer with the adapter's new tokens, for which the model gets rows.

    Where one of two tied modules has others as a whole, they are tied no more.
    """
    try:
        shapes = Embeddings(model, tokenizer).shapes(stored.spec)
    except ConfigError as error:
        raise AdapterFileError(error.message, where=str(stored.path)) from None
    extended = with_new_tokens(tokenizer, stored.spec.new_tokens)
    if stored.spec.new_tokens and len(extended) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(len(extended), mean_resizing=False)
    if any(shape.ids is None for shape in shapes.values()):
        model.config.get_text_config().tie_word_embeddings = False
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    for name in (name for name in ROWS if name in shapes):
        module = model.get_output_embeddings() if name == OUTPUT_ROWS else model.get_input_embeddings()
        (rows,), ids = stored.tensors[name], shapes[name].ids
        if [tuple(rows.shape)] != list(shapes[name].tensor_shapes):
            found = f"{name} are {tuple(rows.shape)}; the base model's are {shapes[name].tensor_shapes[0]}"
            raise AdapterFileError(f"{found}.", where=str(stored.path))
        module.weight[slice(None) if ids is None else torch.from_numpy(ids)] = rows.to(module.weight.dtype)
    return extended
