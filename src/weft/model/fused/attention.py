"""Causal attention inside samples for the fused step, forward and backward.

On a GPU from Hopper on, and on a CPU, by weft.kernels.layers.attention; on older GPUs by torch's variable-length
kernel. Shape suffixes: T rows, E all heads of q, k and v side by side, H query heads, K key/value heads, C head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from weft.kernels.device import capability, is_gpu
from weft.kernels.layers.attention import AttentionBlocks, attend
from weft.kernels.layers.attention_grad import attend_grad
from weft.kernels.layers.rotary import Heads
from weft.model.fused.inputs import Inputs
from weft.model.packing.attention import in_fixed_order, varlen

QkvParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q_THC, k_TKC, v_TKC or their gradients."""


@dataclass(frozen=True)
class Attended:
    """An attention's result, and the way back from it."""

    output_THC: torch.Tensor
    gradients: Callable[[torch.Tensor], QkvParts]
    """From the gradient of the output to those of q, k and v; equal inputs give equal bits."""


@lru_cache(maxsize=16)
def needs_bounds(device: torch.device) -> bool:
    """Whether attention on a device is torch's, which is told where samples begin and how long the longest is: ours
    wants the shared memory of Hopper and of the large Blackwells, which those for desktops (12.0) have not."""
    return is_gpu(device) and capability(device)[0] not in (9, 10)


def attention(
    qkv_TE: torch.Tensor, heads: Heads, inputs: Inputs, scale: float, window: int | None, *, needs_grad: bool
) -> Attended:
    """Attention of q, k and v side by side, each query within its own sample; padding rows are left undefined."""
    q_THC, k_TKC, v_TKC = _parts(qkv_TE, heads)
    if needs_bounds(qkv_TE.device):
        return _torch_attention((q_THC, k_TKC, v_TKC), inputs, scale, window, needs_grad=needs_grad)
    blocks = AttentionBlocks(inputs.part("blocks"), inputs.spans)
    out_THC, lse_HT = attend(q_THC, k_TKC, v_TKC, blocks, scale, window)

    def gradients(grad_THC: torch.Tensor) -> QkvParts:
        dqkv_TE = attend_grad(grad_THC, q_THC, k_TKC, v_TKC, out_THC, lse_HT, blocks, scale, window)
        return _parts(dqkv_TE, heads)

    return Attended(out_THC, gradients)


def _parts(qkv_TE: torch.Tensor, heads: Heads) -> QkvParts:
    q, k, v = (part.unflatten(1, (-1, heads.size)) for part in qkv_TE.split(heads.sizes, dim=1))
    return q, k, v


def _torch_attention(
    parts: QkvParts, inputs: Inputs, scale: float, window: int | None, *, needs_grad: bool
) -> Attended:
    q, k, v = (part.detach().requires_grad_(needs_grad) for part in parts)
    with torch.set_grad_enabled(needs_grad):
        output_THC = varlen(q, k, v, inputs.part("bounds"), inputs.shape.longest, scale, window)
    return Attended(output_THC.detach(), partial(_torch_gradients, output_THC, (q, k, v)))


def _torch_gradients(output_THC: torch.Tensor, leaves: QkvParts, grad_THC: torch.Tensor) -> QkvParts:
    with in_fixed_order():
        dq, dk, dv = torch.autograd.grad(output_THC, leaves, grad_THC)
    return dq, dk, dv
