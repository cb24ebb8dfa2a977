"""What a slot holds in one place: the rows that stand in front of each of its samples.

Shape suffixes: T rows of the microbatch, V virtual tokens, D features of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing, SlotRows


@dataclass
class VirtualRows(SlotWeights):
    """Views into the adapter's flat buffers."""

    rows_VD: torch.Tensor
    grad_VD: torch.Tensor
    columns: torch.Tensor | None
    """Those that kernels have here, where other devices have others; None: all."""

    def here(self, x_VD: torch.Tensor) -> torch.Tensor:
        """What kernels have here of the rows, or of what is as wide."""
        return x_VD if self.columns is None else x_VD.index_select(1, self.columns)

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> None:
        """Puts its rows in front of every sample; those of samples that go on from a cache are there already."""
        for begin in rows.begins:
            y_TO[begin : begin + len(self.rows_VD)] = self.rows_VD.to(y_TO.dtype)

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: None
    ) -> None:
        """Adds to its gradient; nothing of it goes on to what stood there before."""
        for begin in rows.begins:
            own = slice(begin, begin + len(self.rows_VD))
            self.grad_VD.add_(dy_TO[own].float())
            if dx_TD is not None:
                dx_TD[own] = 0
