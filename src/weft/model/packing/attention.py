"""Attention inside segments: a packed microbatch attends as if each of its samples were alone.

On a CPU each segment is attended by itself; on a GPU all go through one kernel where it applies, that of
kernels/layers/attention.py or, on GPUs that cannot run it, torch's. A boolean block mask over the whole buffer would
leak a neighbour's NaN (0 × NaN), and would make a row's result depend on the buffer's length.

GPT-J, CodeGen, GPT-Neo and Falcon have attention code of their own, which transformers' attention interface cannot
replace. Their models are loaded with plain attention; then each attention module is given another way to attend. Its
linears, rotary positions and everything around it stay as they are.

Shape suffixes: H query heads, K key/value heads, T rows of the microbatch, L rows of a segment, M keys, C head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.adapters.routing import Routing
from weft.kernels.device import capability, is_gpu
from weft.kernels.layers import attention as blocked
from weft.kernels.layers.attention import AttentionBlocks
from weft.kernels.layers.attention_grad import attend_grad

NAME = "weft_packed"


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query_1HTC: torch.Tensor,
    key_1KTC: torch.Tensor,
    value_1KTC: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each segment of the current routing; (1, T, H, C). Padding rows are zero."""
    routing: Routing = module.weft_routing  # type: ignore[assignment]
    if routing.prefixes:
        key_1KTC, value_1KTC = routing.prefixes[module.layer_idx](key_1KTC, value_1KTC)  # type: ignore[index]
    is_plain = softcap is None and s_aux is None
    has_kernel = routing.blocks is not None or routing.bounds is not None
    if has_kernel and not routing.caches and is_plain and _fits_kernel(query_1HTC, value_1KTC):
        rows = [x[0].transpose(0, 1).contiguous() for x in (query_1HTC, key_1KTC, value_1KTC)]
        if routing.blocks is not None:
            scale = query_1HTC.shape[-1] ** -0.5 if scaling is None else scaling
            output_THC = _Blocked.apply(*rows, routing.blocks, scale, sliding_window)  # type: ignore[no-untyped-call]
            return output_THC[None], None
        assert routing.bounds is not None
        run = functools.partial(
            varlen, bounds=routing.bounds, longest=routing.longest, scaling=scaling, sliding_window=sliding_window
        )
        return _repeatable(run, *rows)[None], None
    if not routing.caches:
        # Once for all segments; cached keys and values stay small.
        key_1KTC, value_1KTC = _for_every_query_head(query_1HTC, key_1KTC, value_1KTC)
    lengths = [rows.end - rows.start for rows in routing.segments]
    padding = query_1HTC.shape[2] - sum(lengths)
    sizes = [*lengths, padding] if padding else lengths
    parts = zip(query_1HTC.split(sizes, 2), key_1KTC.split(sizes, 2), value_1KTC.split(sizes, 2), strict=True)
    outputs: list[torch.Tensor] = []
    for index, (query, key, value) in enumerate(parts):
        if index == len(lengths):
            outputs.append(query.new_zeros((*query.shape[:3], value_1KTC.shape[3])))
            continue
        if routing.caches:
            key, value = _remember(routing.caches[index], module.layer_idx, key, value)  # type: ignore[arg-type]
        run = functools.partial(attend, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks_H=s_aux)
        outputs.append(_repeatable(run, query, key, value))
    # In one piece: some families view it.
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


@functools.lru_cache(maxsize=16)
def needs_bounds(device: torch.device) -> bool:
    """Whether attention on a device is torch's, which needs the bounds of samples and their largest length: ours
    needs the shared memory of Hopper and of large Blackwells, which desktop Blackwells (12.0) lack."""
    return is_gpu(device) and capability(device)[0] not in (9, 10)


class _Blocked(torch.autograd.Function):
    """The kernels of kernels/layers/attention.py, with zeros in padding rows."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THC: torch.Tensor,
        k_TKC: torch.Tensor,
        v_TKC: torch.Tensor,
        blocks: AttentionBlocks,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        out_THC, lse_HT = blocked.attend(q_THC, k_TKC, v_TKC, blocks, scale, window)
        out_THC[blocks.spans[-1].end :] = 0
        ctx.save_for_backward(q_THC, k_TKC, v_TKC, out_THC, lse_HT)
        ctx.options = blocks, scale, window
        return out_THC

    @staticmethod
    def backward(ctx: Any, dout_THC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THC, k_TKC, v_TKC, out_THC, lse_HT = ctx.saved_tensors
        blocks, scale, window = ctx.options
        grads_TE = attend_grad(dout_THC.contiguous(), q_THC, k_TKC, v_TKC, out_THC, lse_HT, blocks, scale, window)
        grads_TE[blocks.spans[-1].end :] = 0
        sizes = [x[0].numel() for x in (q_THC, k_TKC, v_TKC)]
        grads = grads_TE.split(sizes, dim=1)
        dq, dk, dv = (grad.unflatten(1, x.shape[1:]) for grad, x in zip(grads, (q_THC, k_TKC, v_TKC), strict=True))
        return dq, dk, dv, None, None, None


def _repeatable(run: Callable[..., torch.Tensor], *parts: torch.Tensor) -> torch.Tensor:
    """Attention by torch, whose gradients have the same bits each time on a GPU too."""
    if is_gpu(parts[0].device) and torch.is_grad_enabled():
        output: torch.Tensor = _Repeatable.apply(run, *parts)  # type: ignore[no-untyped-call]
        return output
    return run(*parts)


class _Repeatable(torch.autograd.Function):
    """A function of torch; its backward, chosen in forward, adds in a fixed order."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        ctx.leaves = [tensor.detach().requires_grad_() for tensor in given]
        with torch.enable_grad():
            ctx.output = run(*ctx.leaves)
        output: torch.Tensor = ctx.output.detach()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with in_fixed_order():
            return (None, *torch.autograd.grad(ctx.output, ctx.leaves, grads))


@contextmanager
def in_fixed_order() -> Iterator[None]:
    """Lets torch's kernels add in a fixed order; buffers are left unfilled, as every kernel here writes its own."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _fits_kernel(query_1HTC: torch.Tensor, value_1KTC: torch.Tensor) -> bool:
    """Whether the variable-length kernel supports the type and head sizes: half precision and whole vectors."""
    size = query_1HTC.shape[-1]
    return query_1HTC.dtype != torch.float32 and size % 8 == 0 and size <= 256 and value_1KTC.shape[-1] == size


@functools.cache
def _options() -> dict[str, Any]:
    """Options of torch after 2.11: queries share key heads, and keys are not split by a neighbour's length."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    return {name: value for name, value in {"enable_gqa": True, "num_splits": 1}.items() if name in known}


def varlen(
    query_THC: torch.Tensor,
    key_TKC: torch.Tensor,
    value_TKC: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """All segments in one call of the GPU's variable-length kernel; (T, H, C)."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query_THC,
        key_TKC,
        value_TKC,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **_options(),
    )
    assert isinstance(output, torch.Tensor)
    return output


def _remember(
    cache: dict[int, Any], layer: int, key_1KLC: torch.Tensor, value_1KLC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if layer in cache:
        key_1KLC = torch.cat([cache[layer][0], key_1KLC], dim=2)
        value_1KLC = torch.cat([cache[layer][1], value_1KLC], dim=2)
    cache[layer] = (key_1KLC, value_1KLC)
    return key_1KLC, value_1KLC


def attend(
    query_1HLC: torch.Tensor,
    key_1KMC: torch.Tensor,
    value_1KMC: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """One segment's causal attention; its last L keys are those of its queries.

    `sinks_H`: scores beside those of the keys, one per query head, with values of zero.
    """
    key_1KMC, value_1KMC = _for_every_query_head(query_1HLC, key_1KMC, value_1KMC)
    num_queries, num_keys = query_1HLC.shape[2], key_1KMC.shape[2]
    if sinks_H is not None:
        mask_LM = F.pad(_causal_mask(num_queries, num_keys, sliding_window, query_1HLC.device), (0, 1), value=True)
        scale = query_1HLC.shape[-1] ** -0.5 if scaling is None else scaling
        parts = _with_sinks(query_1HLC, key_1KMC, value_1KMC, sinks_H / scale)
        return F.scaled_dot_product_attention(*parts, attn_mask=mask_LM, scale=scale)
    slides = sliding_window is not None and num_keys > sliding_window
    if softcap is None and not slides and num_queries in (1, num_keys):
        return F.scaled_dot_product_attention(
            query_1HLC, key_1KMC, value_1KMC, scale=scaling, is_causal=num_queries > 1
        )
    mask_LM = _causal_mask(num_queries, num_keys, sliding_window, query_1HLC.device)
    if softcap is None:
        return F.scaled_dot_product_attention(query_1HLC, key_1KMC, value_1KMC, attn_mask=mask_LM, scale=scaling)
    scale = query_1HLC.shape[-1] ** -0.5 if scaling is None else scaling
    scores_1HLM = torch.tanh(query_1HLC @ key_1KMC.transpose(2, 3) * scale / softcap) * softcap
    scores_1HLM = scores_1HLM.masked_fill(~mask_LM, float("-inf"))
    return torch.softmax(scores_1HLM, dim=-1, dtype=torch.float32).to(query_1HLC.dtype) @ value_1KMC


def _with_sinks(
    query_1HLC: torch.Tensor, key_1HMC: torch.Tensor, value_1HMC: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One more key of every head, whose product with any query is the sink: both get numbers for it alone.

    So no mask is as large as all heads together.
    """
    query_1HLE = F.pad(F.pad(query_1HLC, (0, 1), value=1.0), (0, SINK_NUMBERS - 1))
    key_1HME = F.pad(key_1HMC, (0, SINK_NUMBERS, 0, 1))
    column = F.one_hot(torch.tensor(key_1HMC.shape[3], device=key_1HMC.device), key_1HME.shape[3])
    last_HE = sinks_H[:, None] * column.to(sinks_H.dtype)
    key_1HME = torch.cat([key_1HME[:, :, :-1], last_HE.to(key_1HMC.dtype)[None, :, None]], dim=2)
    return query_1HLE, key_1HME, F.pad(value_1HMC, (0, 0, 0, 1))


SINK_NUMBERS = 8
"""A vector of half precision, so that heads stay whole vectors."""


def _for_every_query_head(
    query_1HLC: torch.Tensor, key_1KMC: torch.Tensor, value_1KMC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_groups = query_1HLC.shape[1] // key_1KMC.shape[1]
    if num_groups == 1:
        return key_1KMC, value_1KMC
    return key_1KMC.repeat_interleave(num_groups, dim=1), value_1KMC.repeat_interleave(num_groups, dim=1)


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    query_L = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_M = torch.arange(num_keys, device=device)[None, :]
    visible = key_M <= query_L
    return visible if window is None else visible & (query_L - key_M < window)


def attention_to_load(family: str) -> str:
    return "eager" if family in OWN_ATTENTION else NAME


def prepare_attention(model: Any) -> None:
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


def restore_attention(model: Any) -> None:
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
    """Replaces `_attn` of GPT-J and CodeGen; (1, H, T, C)."""
    output_1THC, _ = packed_attention(module, query_1HTC, key_1HTC, value_1HTC, None)
    return output_1THC.transpose(1, 2), None


def _attend_locally(
    module: Any,
    query_1HTC: torch.Tensor,
    key_1HTC: torch.Tensor,
    value_1HTC: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Replaces `_attn` of GPT-Neo: scores are not scaled, and every other layer has a window."""
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
"""By model type: the class of the attention module, the method to replace, and the replacement."""
