"""Where adapters can sit in a model besides its linears: what its first layer and its attentions see, and what its
blocks make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.adapters.block_output import BlockOutput
from weft.adapters.leading_rows import InputRows, KeyValueRows
from weft.adapters.routing import Routing
from weft.methods.virtual_tokens.files import layer_path
from weft.model.model_part import ModelPart
from weft.plan.families.registry import FAMILIES, describe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def inputs_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, routing: Routing) -> InputRows:
    """What the first layer sees."""
    embeddings: Any = model.get_input_embeddings()
    width = int(embeddings.weight.shape[1])

    def embed(ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = embeddings(ids.to(model.device))
        return embedded

    inputs = InputRows(width, routing, embed, lambda text: list(tokenizer.encode(text)))
    inputs.weight = embeddings.weight
    return inputs


def keys_and_values_of(model: PreTrainedModel, part: ModelPart | None, routing: Routing) -> dict[str, KeyValueRows]:
    """What each layer's attention sees; nothing where the family has no description."""
    config = model.config.to_dict()
    if config.get("model_type") not in FAMILIES:
        return {}
    sizes = describe(config).sizes
    width = 2 * sizes.num_kv_heads * sizes.head_size
    layers = range(sizes.num_layers) if part is None else range(part.first, part.end)
    return {layer_path(layer): KeyValueRows(layer, width, routing) for layer in layers}


def block_paths_of(model: PreTrainedModel) -> list[str]:
    """The blocks of a decoder, as its family's description names them."""
    config = model.config
    if config.model_type not in FAMILIES:
        return []
    sizes, decoder = describe(config.to_dict()).sizes, model.base_model_prefix
    return [f"{decoder}.layers.{layer}.{name}" for layer in range(sizes.num_layers) for name in sizes.form.blocks]


def blocks_of(model: PreTrainedModel, paths: Sequence[str], routing: Routing) -> dict[str, BlockOutput]:
    """The outputs of those blocks that are there."""
    modules, config = dict(model.named_modules()), model.config.to_dict()
    return {path: BlockOutput(modules[path], config["hidden_size"], routing) for path in paths if path in modules}
