"""Gradients summed over the rows of one sample, in fp32."""

from __future__ import annotations

import torch


def add_product(grad_MN: torch.Tensor, left_LM: torch.Tensor, right_LN: torch.Tensor, scale: float) -> None:
    """Grad (fp32) += scale · leftᵀ right, summed in fp32 whatever the type of the factors."""
    if left_LM.dtype is torch.float32:
        grad_MN.addmm_(left_LM.t(), right_LN, alpha=scale)
    elif left_LM.is_cuda:
        grad_MN.add_(torch.mm(left_LM.t(), right_LN, out_dtype=torch.float32), alpha=scale)
    else:
        grad_MN.addmm_(left_LM.t().float(), right_LN.float(), alpha=scale)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """All windows of a slot in one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
