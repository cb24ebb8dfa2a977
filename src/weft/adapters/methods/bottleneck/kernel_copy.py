"""A bottleneck as kernels read it: D and scale · U as A and B of a LoRA behind the block, and scale · c as a shift.

b, f and their way back are in rank space (`kernels/methods/inner.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.adapters.methods.bottleneck.weights import BottleneckWeights
from weft.adapters.methods.lora.compute_copy import ComputeCopy
from weft.adapters.methods.lora.weights import LoraWeights
from weft.kernels.methods.parts import ColumnChange, InnerChange, OtherParts

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class BottleneckCopy(ComputeCopy):
    """What kernels read of one adapter, and where they leave the gradients of scale · c."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, blocks: Mapping[str, BottleneckWeights]) -> None:
        """`blocks`: by path."""
        self._blocks = blocks
        products = {}
        for path, w in blocks.items():
            (down, _, up, _), (grad_down, _, grad_up, _) = w.params, w.grads
            products[path] = LoraWeights(down, up, grad_down, grad_up, w.scale, 0.0, 0, 0)
        super().__init__(adapter, dtype, products, ("down", "up"))
        self._shifts, self._grad_shifts = (
            {path: torch.zeros_like(w.params[3]) for path, w in blocks.items()} for _ in range(2)
        )
        self.others = OtherParts(
            outputs={p: ColumnChange(shift_N=self._shifts[p], grad_shift_N=self._grad_shifts[p]) for p in blocks},
            inner={p: InnerChange(w.params[1], w.grads[1], w.activation) for p, w in blocks.items()},
        )

    def copy_weights(self) -> None:
        """D, scale · U and scale · c."""
        super().copy_weights()
        for path, w in self._blocks.items():
            torch.mul(w.params[3], w.scale, out=self._shifts[path])

    def collect(self) -> None:
        """Adds the gradients of c."""
        for path, w in self._blocks.items():
            w.grads[3].add_(self._grad_shifts[path], alpha=w.scale)
            self._grad_shifts[path].zero_()

    def forget_gradients(self) -> None:
        """Those of scale · c."""
        for grad in self._grad_shifts.values():
            grad.zero_()
