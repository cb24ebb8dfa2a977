"""Packed attention for families whose attention is code of their own, which transformers' attention interface cannot
replace: GPT-J, CodeGen, GPT-Neo and Falcon.

Their models are loaded with plain attention; then each attention module is given another way to attend. Its linears,
rotary positions and everything around it stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from weft.model.packing.attention import NAME, packed_attention


def attention_to_load(family: str) -> str:
    """The attention that a model of a family is loaded with."""
    return "eager" if family in OWN_ATTENTION else NAME


def prepare(model: Any) -> None:
    """Lets the attention modules of a model attend within segments, if its family has code of its own for that."""
    if model.config.model_type not in OWN_ATTENTION:
        return
    kind, attribute, attend = OWN_ATTENTION[model.config.model_type]
    for module in model.modules():
        if type(module).__name__ == kind:
            object.__setattr__(module, attribute, functools.partial(attend, module))
            # GPT-Neo has another name for it.
            module.layer_idx = getattr(module, "layer_id", None) if kind == "GPTNeoSelfAttention" else module.layer_idx
    # No mask over the whole buffer is made for an attention that transformers does not know.
    model.config._attn_implementation = NAME


def restore(model: Any) -> None:
    """Undoes `prepare`."""
    if model.config.model_type not in OWN_ATTENTION:
        return
    kind, attribute, _ = OWN_ATTENTION[model.config.model_type]
    for module in model.modules():
        if type(module).__name__ == kind:
            object.__delattr__(module, attribute)
    model.config._attn_implementation = "eager"


def _attend(
    module: Any,
    query_1HTC: torch.Tensor,
    key_1HTC: torch.Tensor,
    value_1HTC: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """For GPT-J and CodeGen, in place of `_attn`; (1, H, T, C)."""
    output_1THC, _ = packed_attention(module, query_1HTC, key_1HTC, value_1HTC, None)
    return output_1THC.transpose(1, 2), None


def _attend_locally(
    module: Any,
    query_1HTC: torch.Tensor,
    key_1HTC: torch.Tensor,
    value_1HTC: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """For GPT-Neo, in place of `_attn`: scores are not scaled, and every other layer has a window."""
    window = module.config.window_size if module.attention_type == "local" else None
    output_1THC, _ = packed_attention(
        module, query_1HTC, key_1HTC, value_1HTC, None, scaling=1.0, sliding_window=window
    )
    return output_1THC.transpose(1, 2), None


def _falcon_forward(
    module: Any,
    hidden: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Falcon's attention module with rotary positions."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    assert alibi is None and position_embeddings is not None
    heads_1THC = module._split_heads(module.query_key_value(hidden))
    query, key, value = (x.transpose(1, 2) for x in heads_1THC)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    output_1THC = packed_attention(module, query, key, value, None)[0]
    return module.dense(output_1THC.flatten(2)), None


OWN_ATTENTION: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "gptj": ("GPTJAttention", "_attn", _attend),
    "codegen": ("CodeGenAttention", "_attn", _attend),
    "gpt_neo": ("GPTNeoSelfAttention", "_attn", _attend_locally),
    "falcon": ("FalconAttention", "forward", _falcon_forward),
}
"""By model type: the attention module's class, which of its methods is replaced, and by what."""
