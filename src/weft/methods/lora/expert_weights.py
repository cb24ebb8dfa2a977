"""LoRA on one product of a layer's experts, in plain torch.

For each expert e and the choices x of one sample that are its, with s the scale:
    z = x A_eᵀ                        (P, R)
    y += s · z B_eᵀ                   (P, O)
Backward, with dy the gradient of y:
    dz = s · dy B_e                   (P, R)
    dB_e += s · dyᵀ z                 (O, R), fp32, sample by sample in the job's order
    dA_e += dzᵀ x                     (R, D), fp32, likewise
    dx += dz A_e                      (P, D)
A factor may be shared by all experts: its first size is 1, and its gradient is a sum over all choices of a sample.

A sample's choices are computed apart from all others (`kernels/grouped.py`), so neither a neighbour's rows nor the cut
into microbatches changes a bit. An expert without choices of a sample adds nothing.

Shape suffixes: S choices of the microbatch, P those of one sample, E experts or 1, D in, O out, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.adapters.experts import ExpertRows, SampleChoices
from weft.adapters.method import ModuleTensors, SlotWeights
from weft.adapters.routing import Routing, SlotRows
from weft.kernels.grouped import add_grouped_gradient, grouped_product

_WHOLE_VECTOR = 8
"""Ranks of copies in half precision are multiples of this, as grouped products on a GPU need."""


@dataclass
class ExpertLoraWeights(SlotWeights):
    """The adapter on one product: views into its flat buffers."""

    a_ERD: torch.Tensor
    b_EOR: torch.Tensor
    grad_a_ERD: torch.Tensor
    """Empty where A is frozen."""
    grad_b_EOR: torch.Tensor
    scale: float
    columns: slice
    """Outputs of the frozen product that the adapter adds to."""

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> list[torch.Tensor]:
        a_ERD, b_EOR = self.compute_weights(x_TD.dtype)
        own_SO, kept = y_TO[:, self.columns], []
        for choices in _choices(rows):
            x_PD = x_TD[choices.index_P]
            z_PR = grouped_product(x_PD, a_ERD.transpose(1, 2), _ends(choices, a_ERD))
            update_PO = grouped_product(z_PR, b_EOR.transpose(1, 2), _ends(choices, b_EOR))
            own_SO.index_add_(0, choices.index_P, update_PO, alpha=self.scale)
            kept.append(z_PR)
        return kept

    def backward(
        self,
        x_TD: torch.Tensor,
        dy_TO: torch.Tensor,
        dx_TD: torch.Tensor | None,
        rows: SlotRows,
        kept: list[torch.Tensor],
    ) -> None:
        a_ERD, b_EOR = self.compute_weights(dy_TO.dtype)
        for choices, z_PR in zip(_choices(rows), kept, strict=True):
            dy_PO = dy_TO[:, self.columns][choices.index_P]
            dz_PR = grouped_product(dy_PO, b_EOR, _ends(choices, b_EOR)).mul_(self.scale)
            self._add(self.grad_b_EOR, dy_PO, z_PR, choices, self.scale)
            if self.grad_a_ERD.numel():
                self._add(self.grad_a_ERD, dz_PR, x_TD[choices.index_P], choices, 1.0)
            if dx_TD is not None:
                dx_PD = grouped_product(dz_PR, a_ERD, _ends(choices, a_ERD))
                dx_TD.index_add_(0, choices.index_P, dx_PD)

    def _add(
        self, grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, choices: SampleChoices, scale: float
    ) -> None:
        add_grouped_gradient(grad, left, right, _ends(choices, grad), scale)

    def compute_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B in the type of the activations; in half precision with ranks of whole vectors."""
        if dtype is torch.float32:
            return self.a_ERD, self.b_EOR
        missing = -self.a_ERD.shape[1] % _WHOLE_VECTOR
        return F.pad(self.a_ERD.to(dtype), (0, 0, 0, missing)), F.pad(self.b_EOR.to(dtype), (0, missing))


def merge_factors(weight_EOD: torch.Tensor, factors: ModuleTensors, scale: float) -> None:
    """Adds the product of factors to the weights of experts, one expert after the other."""
    a_ERD, b_EOR = factors
    for expert, weight_OD in enumerate(weight_EOD):
        a_RD, b_OR = (factor[min(expert, len(factor) - 1)].float() for factor in (a_ERD, b_EOR))
        weight_OD.copy_((weight_OD.float() + scale * (b_OR @ a_RD).to(weight_OD.device)).to(weight_OD.dtype))


def _choices(rows: SlotRows) -> tuple[SampleChoices, ...]:
    assert isinstance(rows, ExpertRows), "it sits on products of experts"
    return rows.choices


def _ends(choices: SampleChoices, factor: torch.Tensor) -> torch.Tensor:
    """The ends of the groups that a factor has weights for."""
    return choices.ends_1 if len(factor) == 1 else choices.ends_E
