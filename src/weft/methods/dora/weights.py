"""DoRA on the rows of one slot, in plain torch.

With n the lengths of the rows of W + s B A, taken as constants in backward, and g = m / n:
    u = x Wᵀ + s x Aᵀ Bᵀ,    y = g ⊙ u + bias
    dm += Σ dy ⊙ u / n,    and with dz = g ⊙ dy: the frozen product has the gradient dz, A and B have LoRA's of dz
The lengths are computed in every forward, without W + s B A itself:
    ‖w + s b A‖² = ‖w‖² + 2 s (w Aᵀ) · b + s² (b A Aᵀ) · b        for a row w of W and the row b of B beside it
So they cost numbers per output and two products of rank R, and no more than `_ROWS` rows of W are fp32 at once. They
depend on W, A and B alone: the same with any neighbours, and after a restart.

With dropout, PEFT leaves the frozen product as it is and puts the dropped rows x̃ through W once more:
    u = x̃ Wᵀ + s x̃ Aᵀ Bᵀ,    y = x Wᵀ + bias + g ⊙ u − x̃ Wᵀ
    dm as above,    dx gets drop((dz − dy) W + dz's LoRA part) beside the gradient dy of the frozen product
Where nothing is dropped, both are the same.

The sums run over the rows of one sample at a time, in fp32 and in the job's order. Scaling is done in fp32 and rounded
once. Products over rows run in the slot's windows; of other slots' rows no result is used.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, D in, O out, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weft.adapters.method import Site, SlotWeights, frozen_weight
from weft.adapters.routing import Routing, SlotRows
from weft.methods.lora.weights import KeptRows, LoraWeights

_ROWS = 2048


def squared_norms(weight_OD: torch.Tensor) -> torch.Tensor:
    """‖w‖² of every row, in fp32."""
    return torch.cat([rows_ND.float().square().sum(dim=1) for rows_ND in weight_OD.split(_ROWS)])


def updated_norms(
    weight_OD: torch.Tensor,
    squared_O: torch.Tensor,
    a_RD: torch.Tensor,
    b_OR: torch.Tensor,
    scale: float,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda part_O: part_O,
) -> torch.Tensor:
    """Row norms of W + scale · B A, given W's squared norms. `add_up`: over devices that each hold some inputs."""
    a_DR = a_RD.t()
    shared_OR = torch.cat([rows_ND.float().mm(a_DR) for rows_ND in weight_OD.split(_ROWS)])
    both_OR = shared_OR.mul_(2 * scale).add_(b_OR.mm(a_RD.mm(a_DR)), alpha=scale * scale)
    # Rounding may leave less than nothing of a row that B A takes away.
    return add_up(squared_O + (both_OR * b_OR).sum(dim=1)).clamp_min_(0).sqrt_()


KeptDora = tuple[KeptRows, torch.Tensor]
"""LoRA's kept tensors, and u of the slot's rows."""


@dataclass
class DoraWeights(SlotWeights):
    changes_gradient: ClassVar[bool] = True

    lora: LoraWeights
    m_O: torch.Tensor
    grad_m_O: torch.Tensor
    site: Site
    norms_O: torch.Tensor = field(init=False)
    """n of the last forward; the weights do not change before its backward is done."""
    _squared_O: torch.Tensor | None = field(default=None, init=False)

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> KeptDora:
        own, bias_O = rows.own, self.site.bias_O
        self._measure()
        if bias_O is not None:
            y_TO[own] -= bias_O
        kept = self.lora.forward(x_TD, y_TO, rows, routing)
        u_LO = y_TO[own].clone()
        y_TO[own] = u_LO.float() * self._factors_O
        if bias_O is not None:
            y_TO[own] += bias_O
        return kept, u_LO

    def change_gradient(self, dy_TO: torch.Tensor, rows: SlotRows) -> None:
        dy_TO[rows.own] = dy_TO[rows.own].float() * self._factors_O

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: KeptDora
    ) -> None:
        self._backward(x_TD, dy_TO, self._scaled(dy_TO, rows), dx_TD, rows, kept)

    def _backward(
        self,
        x_TD: torch.Tensor,
        dy_TO: torch.Tensor,
        dz_TO: torch.Tensor,
        dx_TD: torch.Tensor | None,
        rows: SlotRows,
        kept: KeptDora,
    ) -> None:
        kept_lora, u_LO = kept
        self.lora.backward(x_TD, dz_TO, dx_TD, rows, kept_lora)
        for sample in rows.samples:
            products_LO = dy_TO[sample.buffer].float() * u_LO[sample.slot].float()
            self.grad_m_O.add_(products_LO.sum(dim=0).div_(self.norms_O))

    def _scaled(self, dy_TO: torch.Tensor, rows: SlotRows) -> torch.Tensor:
        """dz: a copy of dy in which the slot's rows are scaled."""
        dz_TO = dy_TO.clone()
        dz_TO[rows.own] = dz_TO[rows.own].float() * self._factors_O
        return dz_TO

    @property
    def _factors_O(self) -> torch.Tensor:
        return self.m_O / self.norms_O

    def _measure(self) -> None:
        weight_OD = frozen_weight(self.site)
        if self._squared_O is None:
            self._squared_O = squared_norms(weight_OD)
        lora = self.lora
        add_up = self.site.share.over_inputs
        self.norms_O = updated_norms(weight_OD, self._squared_O, lora.a_RD, lora.b_OR, lora.scale, add_up)


@dataclass
class DroppingDoraWeights(DoraWeights):
    """The same with dropout, where rows go through W twice."""

    changes_gradient: ClassVar[bool] = False

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> KeptDora:
        if routing.dropout_keys_T is None:
            return super().forward(x_TD, y_TO, rows, routing)
        own = rows.own
        self._measure()
        weight_DO = frozen_weight(self.site).to(x_TD.dtype).t()
        before_LO = y_TO[own].clone()
        for window in rows.windows:
            dropped_LD = self.lora.dropped(x_TD[window.computed], self.lora.keep(window, routing, x_TD.shape[1]))
            y_TO[window.own] = dropped_LD.mm(weight_DO)[window.inside]
        product_LO = y_TO[own].clone()
        kept = self.lora.forward(x_TD, y_TO, rows, routing)
        u_LO = y_TO[own].clone()
        scaled_LO = u_LO.float() * self._factors_O
        y_TO[own] = before_LO.float() + (scaled_LO - product_LO.float())
        return kept, u_LO

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: KeptDora
    ) -> None:
        """Adds to dA, dB and dm, and to dx all but the frozen product's gradient of dy."""
        dz_TO = self._scaled(dy_TO, rows)
        if dx_TD is not None:
            weight_OD = frozen_weight(self.site).to(dy_TO.dtype)
            for window, (_, keep_LD) in zip(rows.windows, kept[0], strict=True):
                more_LO = dz_TO[window.computed] - dy_TO[window.computed]
                dx_TD[window.own] += self.lora.dropped(more_LO.mm(weight_OD), keep_LD)[window.inside]
        self._backward(x_TD, dy_TO, dz_TO, dx_TD, rows, kept)
