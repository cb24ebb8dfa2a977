"""Gradients summed over the rows of one sample, in fp32, and over samples where their order must not matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weft.kernels.fixed_point import FixedPointSum, SumWords


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


class AnyOrderSums:
    """The gradients of one place in an adapter with order-independent sums.

    Methods add to the fp32 buffers as ever, and know nothing of this. What they added for one sample is taken from
    there before the next sample comes, and the sum of all is put there when the global batch is whole.
    """

    def __init__(self, groups: Sequence[str], grads: Sequence[torch.Tensor]) -> None:
        """`grads`: views of the adapter's buffers of these groups; those of frozen groups are empty."""
        named = zip(groups, grads, strict=True)
        self._sums = [(group, grad, FixedPointSum(grad)) for group, grad in named if grad.numel()]

    def take_sample(self) -> None:
        """Adds what one sample has left in the buffers."""
        for _, _, total in self._sums:
            total.take()

    def give(self) -> None:
        """Puts the sums into the buffers; those of nothing are left out, since kernels may have sums of their own."""
        for _, grad, total in self._sums:
            if not total.is_empty:
                grad.copy_(total.total().view_as(grad))

    def words(self) -> Iterator[tuple[str, SumWords]]:
        """The sums so far, each with its group."""
        for group, _, total in self._sums:
            yield group, total.words()

    def forget(self) -> None:
        """Begins again."""
        for _, _, total in self._sums:
            total.forget()
