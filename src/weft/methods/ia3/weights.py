"""IA³ on the rows of one slot, in plain torch.

On the outputs of a module:
    y = l ⊙ p with p = x Wᵀ + b;    dl += Σ dy ⊙ p,    dp = l ⊙ dy
On the inputs of a feed-forward module:
    y = z Wᵀ + b with z = l ⊙ x;    dl += Σ dz ⊙ x,    dx = l ⊙ dz, where dz = dy W

The sums go over the rows of one sample at a time, in fp32 and in the job's order. l is near 1, where bfloat16 has steps
of 1/128: products with it are taken in fp32 and rounded once, as PEFT does. No row of another slot is read.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, D in, O out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing, SlotRows


@dataclass
class OutputScale(SlotWeights):
    """One number per output of a module: views into the adapter's flat buffer."""

    changes_gradient: ClassVar[bool] = True

    l_O1: torch.Tensor
    grad_l_O1: torch.Tensor

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> torch.Tensor:
        """Scales y; keeps what it was."""
        product_LO = y_TO[rows.own].clone()
        _scale(y_TO, self.l_O1, rows)
        return product_LO

    def change_gradient(self, dy_TO: torch.Tensor, rows: SlotRows) -> None:
        """The gradient of the frozen product."""
        _scale(dy_TO, self.l_O1, rows)

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: torch.Tensor
    ) -> None:
        """Adds to dl; dx is complete."""
        for sample in rows.samples:
            _accumulate(self.grad_l_O1, dy_TO[sample.buffer], kept[sample.slot])


@dataclass
class InputScale(SlotWeights):
    """One number per input of a feed-forward module: views into the adapter's flat buffer."""

    changes_input: ClassVar[bool] = True

    l_1D: torch.Tensor
    grad_l_1D: torch.Tensor

    def change_input(self, x_TD: torch.Tensor, rows: SlotRows) -> None:
        """What the frozen product sees."""
        _scale(x_TD, self.l_1D, rows)

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> None:
        """Has done its part before the product."""

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: None
    ) -> None:
        """Adds to dl, and makes dx, so far the gradient of the scaled inputs, that of x."""
        assert dx_TD is not None
        for sample in rows.samples:
            _accumulate(self.grad_l_1D, dx_TD[sample.buffer], x_TD[sample.buffer])
        _scale(dx_TD, self.l_1D, rows)


def _scale(x_TN: torch.Tensor, l: torch.Tensor, rows: SlotRows) -> None:  # noqa: E741
    """Multiplies the slot's rows of x in place."""
    own_LN = x_TN[rows.own]
    own_LN.copy_(own_LN.float() * l.flatten())


def _accumulate(grad: torch.Tensor, left_LN: torch.Tensor, right_LN: torch.Tensor) -> None:
    grad.view(-1).add_((left_LN.float() * right_LN.float()).sum(dim=0))
