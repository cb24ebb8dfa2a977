"""A change of a bias on the rows of one slot, in plain torch: y = x Wᵀ + b + c;    dc += Σ dy.

The sum goes over the rows of one sample at a time, in fp32 and in the job's order. y is changed in fp32 and rounded
once. No row of another slot is read.

Shape suffixes: T rows of the microbatch, L rows of a slot, D in, O out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing, SlotRows


@dataclass
class BiasChange(SlotWeights):
    """One number per output of a module: views into the adapter's flat buffer."""

    change_O: torch.Tensor
    grad_O: torch.Tensor
    is_added: bool
    """False where another device adds it to what all of them find together."""

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> None:
        """Adds it to y."""
        if not self.is_added:
            return
        own_LO = y_TO[rows.own]
        own_LO.copy_(own_LO.float() + self.change_O)

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: None
    ) -> None:
        """Adds to its gradient; dx is complete."""
        for sample in rows.samples if self.is_added else ():
            self.grad_O.add_(dy_TO[sample.buffer].float().sum(dim=0))
