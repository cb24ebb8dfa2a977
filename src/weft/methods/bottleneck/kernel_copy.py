"""A bottleneck as kernels read it: D and scale · U as A and B of a LoRA behind the block, and scale · c as a shift.

b, f and their way back are in rank space (`kernels/methods/inner.py`).

Shape suffix: N numbers of all blocks, or of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.kernels.methods.parts import ColumnChange, InnerChange, OtherParts
from weft.methods.bottleneck.weights import BottleneckWeights
from weft.methods.lora.compute_copy import ComputeCopy
from weft.methods.lora.weights import LoraWeights

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


SHIFTS = "up_bias"
"""The group of c."""


class BottleneckCopy(ComputeCopy):
    """What kernels read of one adapter, and where they leave the gradients of scale · c."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, blocks: Mapping[str, BottleneckWeights]) -> None:
        """`blocks`: by path."""
        products = {}
        for path, w in blocks.items():
            (down, _, up, _), (grad_down, _, grad_up, _) = w.params, w.grads
            products[path] = LoraWeights(down, up, grad_down, grad_up, w.scale, 0.0, 0, 0)
        super().__init__(adapter, dtype, products, ("down", "up"))
        self._outer_scale = adapter.spec.bottleneck_scale
        self._shifts_N, self._grad_shifts_N = (torch.zeros_like(adapter.flat()[SHIFTS]) for _ in range(2))
        """Of all blocks, one after the other, as the adapter holds them."""
        sizes = [w.params[3].numel() for w in blocks.values()]
        views = zip(blocks, self._shifts_N.split(sizes), self._grad_shifts_N.split(sizes), strict=True)
        self.others = OtherParts(
            outputs={path: ColumnChange(shift_N=shift_N, grad_shift_N=grad_N) for path, shift_N, grad_N in views},
            inner={p: InnerChange(w.params[1], w.grads[1], w.activation) for p, w in blocks.items()},
        )

    def copy_weights(self) -> None:
        """D, scale · U and scale · c."""
        super().copy_weights()
        torch.mul(self._adapter.flat()[SHIFTS], self._outer_scale, out=self._shifts_N)

    def collect(self) -> None:
        """Adds the gradients of c."""
        self._adapter.groups[SHIFTS].grad.add_(self._grad_shifts_N, alpha=self._outer_scale)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Those of scale · c."""
        self._grad_shifts_N.zero_()
