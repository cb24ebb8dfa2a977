"""Changes by methods other than LoRA at the sites of a layer, forward and backward.

At a site of linears, with y its outputs:
    y' = factor ⊙ y + shift                       back: dfactor, dshift;  dy = factor ⊙ dy'
    y' = y + x Δᵀ with a sparse Δ                 back: dΔ on its positions;  dx += dy' Δ
At the end of a block, with y what it adds to the residual stream:
    y' = y + f(y Dᵀ + b) Uᵀ + c                   back: D and U as LoRA's A and B, f and b in rank space, c as a shift
In front of samples, rows that an adapter fills. All of it leaves the rows of other slots as they are, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.kernels.lora.expand import expand, expand_grad
from weft.kernels.lora.shrink import shrink, shrink_grad
from weft.kernels.lora.tables import INPUTS, OUTPUTS, RowTables, Site, SlotTable
from weft.kernels.lora.weight_grad import weight_grad
from weft.kernels.methods.columns import change_columns, column_sums, owned_copy
from weft.kernels.methods.inner import activate, activate_grad
from weft.kernels.methods.leading_rows import put_rows, rows_grad
from weft.kernels.methods.sparse import sparse, sparse_grad, sparse_input


@dataclass(frozen=True)
class SavedBlockEnd:
    y_TD: torch.Tensor
    a_TW: torch.Tensor
    inner_TW: torch.Tensor


@dataclass(frozen=True)
class OtherChanges:
    rows: RowTables
    table: SlotTable
    is_adapted: bool
    begins: bool = True
    """Whether samples begin here, or rows continue sequences that were read before."""
    _turned: dict[int, torch.Tensor] = field(default_factory=dict)
    """Transposed gradients of outputs, from `sparse_input` until `sparse_grad`, by site."""

    def _has(self, kind: str, role: str) -> bool:
        return self.is_adapted and self.table.has_change(kind, role)

    def outputs(self, site: Site, y_TO: torch.Tensor) -> torch.Tensor | None:
        """Changes y; returns the old values of changed rows for `outputs_grad`, or None if none changes."""
        if not self._has("outputs", site.role):
            return None
        before_TO = torch.empty_like(y_TO)
        change_columns(y_TO, y_TO, site, self.rows, self.table, OUTPUTS, kept_TN=before_TO)
        return before_TO

    def outputs_again(self, site: Site, y_TO: torch.Tensor) -> None:
        if self._has("outputs", site.role):
            change_columns(y_TO, y_TO, site, self.rows, self.table, OUTPUTS)

    def owned(self, site: Site, y_TO: torch.Tensor) -> torch.Tensor | None:
        has_owner = self._has("outputs", site.role)
        return owned_copy(y_TO, site, self.rows, self.table, OUTPUTS) if has_owner else None

    def outputs_grad(
        self, site: Site, dy_TO: torch.Tensor, before_TO: torch.Tensor | None, *, stays: bool = True
    ) -> torch.Tensor:
        """The gradient of y before the change; `stays`: dy must not be overwritten."""
        if before_TO is None:
            return dy_TO
        column_sums(dy_TO, before_TO, site, self.rows, self.table, OUTPUTS)
        dz_TO = torch.empty_like(dy_TO) if stays else dy_TO
        change_columns(dy_TO, dz_TO, site, self.rows, self.table, OUTPUTS, shifts=False)
        return dz_TO

    def outputs_grad_in_place(
        self, site: Site, dy_TO: torch.Tensor, own_TO: torch.Tensor | None, *, is_changed: bool = False
    ) -> bool:
        """Turns dy into the gradient of y before the change, given that y, or with `is_changed` changed. Returns
        whether it could."""
        if own_TO is None:
            return False
        column_sums(dy_TO, own_TO, site, self.rows, self.table, OUTPUTS, divides=is_changed)
        change_columns(dy_TO, dy_TO, site, self.rows, self.table, OUTPUTS, shifts=False)
        return True

    def inputs(self, site: Site, x_TD: torch.Tensor) -> bool:
        """Changes the input of a site's linear, or its gradient; returns whether it did."""
        if not self._has("inputs", site.role):
            return False
        change_columns(x_TD, x_TD, site, self.rows, self.table, INPUTS)
        return True

    def inputs_grad(self, site: Site, dx_TD: torch.Tensor, x_TD: torch.Tensor) -> None:
        if self._has("inputs", site.role):
            column_sums(dx_TD, x_TD, site, self.rows, self.table, INPUTS, divides=True)

    def end(self, site: Site, y_TD: torch.Tensor) -> SavedBlockEnd | None:
        if not self._has("inner", site.role):
            return None
        a_TW = y_TD.new_empty(y_TD.shape[0], self.table.rank_class)
        shrink(y_TD, a_TW, site, self.rows, self.table)
        inner_TW = torch.empty_like(a_TW)
        activate(a_TW, inner_TW, site, self.rows, self.table)
        before_TD = self.outputs(site, y_TD)
        assert before_TD is not None, "a bottleneck has a shift"
        expand(y_TD, inner_TW, site, self.rows, self.table)
        return SavedBlockEnd(before_TD, a_TW, inner_TW)

    def end_grad(self, site: Site, dy_TD: torch.Tensor, kept: SavedBlockEnd | None) -> torch.Tensor:
        if kept is None:
            return dy_TD
        column_sums(dy_TD, dy_TD, site, self.rows, self.table, OUTPUTS)
        da_TW = torch.empty_like(kept.a_TW)
        shrink_grad(dy_TD, da_TW, site, self.rows, self.table)
        activate_grad(da_TW, kept.a_TW, site, self.rows, self.table)
        weight_grad(kept.y_TD, kept.inner_TW, dy_TD, da_TW, site, self.rows, self.table)
        dx_TD = dy_TD.clone()
        expand_grad(dx_TD, da_TW, site, self.rows, self.table)
        return dx_TD

    def sparse(self, site: Site, x_TD: torch.Tensor, y_TO: torch.Tensor) -> None:
        if self._has("sparse", site.role):
            sparse(x_TD, y_TO, site, self.rows, self.table)

    def sparse_input(self, site: Site, dy_TO: torch.Tensor, dx_TD: torch.Tensor) -> None:
        if self._has("sparse", site.role):
            turned_KNM = sparse_input(dy_TO, dx_TD, site, self.rows, self.table)
            if turned_KNM is not None:
                self._turned[site.module] = turned_KNM

    def sparse_grad(self, site: Site, x_TD: torch.Tensor, dy_TO: torch.Tensor) -> None:
        if self._has("sparse", site.role):
            turned_KNM = self._turned.pop(site.module, None)
            sparse_grad(x_TD, dy_TO, site, self.rows, self.table, turned_KNM)

    def has_rows(self, role: str) -> bool:
        return self.begins and self._has("rows", role)

    def put_rows(self, role: str, module: int, x_TN: torch.Tensor) -> None:
        if self.has_rows(role):
            put_rows(x_TN, module, self.rows, self.table)

    def rows_grad(self, role: str, module: int, *parts: torch.Tensor) -> None:
        if self.has_rows(role):
            rows_grad(list(parts), module, self.rows, self.table, clears=True)
