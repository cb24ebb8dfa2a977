"""LoRA of all slots at one linear whose frozen product is computed elsewhere, from a microbatch's tables.

    forward:   S = shrink(x),  y += expand(S)
    backward:  dS = shrink_grad(dy),  dx += expand_grad(dS),  dA and dB += weight_grad(x, S, dy, dS)

Shape suffixes: T rows, D in, O out, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.kernels.lora.expand import expand, expand_grad
from weft.kernels.lora.shrink import shrink, shrink_grad
from weft.kernels.lora.tables import RowTables, Site, SlotTable
from weft.kernels.lora.weight_grad import weight_grad


@dataclass(frozen=True)
class LinearKernels:
    site: Site
    table: SlotTable
    rows: RowTables

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' part to y; returns S for the backward."""
        s_TR = x_TD.new_empty(len(x_TD), self.table.rank_class)
        shrink(x_TD, s_TR, self.site, self.rows, self.table)
        expand(y_TO, s_TR, self.site, self.rows, self.table)
        return s_TR

    def backward(self, x_TD: torch.Tensor, s_TR: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None) -> None:
        """Adds the gradients of A and B, and the adapters' part of dx to dx."""
        ds_TR = torch.empty_like(s_TR)
        shrink_grad(dy_TO, ds_TR, self.site, self.rows, self.table)
        if dx_TD is not None:
            expand_grad(dx_TD, ds_TR, self.site, self.rows, self.table)
        weight_grad(x_TD, s_TR, dy_TO, ds_TR, self.site, self.rows, self.table)


@dataclass(frozen=True)
class KernelRows:
    table: SlotTable
    rows: RowTables
    slots: tuple[int, ...]
    """Slots with rows in the microbatch."""

    def at(self, site: Site) -> LinearKernels | None:
        """The kernels of a linear; None if no adapter with rows sits there."""
        if not any(site.module in self.table.entries[slot] for slot in self.slots):
            return None
        return LinearKernels(site, self.table, self.rows)
