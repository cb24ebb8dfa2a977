"""Causal attention inside samples for the fused step, forward and backward by hand.

On a GPU one variable-length kernel runs all samples; elsewhere each is attended by itself. Shape suffixes: T rows,
H query heads, K key/value heads, C head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weft.backbone.attention import attend, varlen
from weft.backbone.fused.inputs import Inputs
from weft.kernels.rotary import Heads


@dataclass(frozen=True)
class Attended:
    """An attention's result and what its backward needs."""

    output_THC: torch.Tensor
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def gradients(self, grad_THC: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k and v; equal inputs give equal bits."""
        with _deterministic():
            return torch.autograd.grad(self.output_THC, self.inputs, grad_THC)


def attention(
    qkv_TE: torch.Tensor, heads: Heads, inputs: Inputs, scale: float, window: int | None, *, needs_grad: bool
) -> Attended:
    """Attention of q, k and v side by side, each query within its own sample."""
    num_rows = qkv_TE.shape[0]
    parts = qkv_TE.detach().split(heads.sizes, dim=1)
    q, k, v = (part.unflatten(1, (-1, heads.size)).requires_grad_(needs_grad) for part in parts)
    with torch.set_grad_enabled(needs_grad):
        if qkv_TE.is_cuda:
            output = varlen(q, k, v, inputs.part("bounds"), inputs.shape.longest, scale, window)
        else:
            outputs = []
            for span in inputs.spans:
                own = [x[span.start : span.end].transpose(0, 1)[None] for x in (q, k, v)]
                outputs.append(attend(own[0], own[1], own[2], scale, window, None)[0].transpose(0, 1))
            padding = num_rows - inputs.spans[-1].end
            output = torch.cat([*outputs, qkv_TE.new_zeros(padding, heads.num_q, heads.size)])
    return Attended(output, (q, k, v))


@contextmanager
def _deterministic() -> Iterator[None]:
    """The kernel's backward adds in a fixed order; buffers are left unfilled, as every kernel here writes its own."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
