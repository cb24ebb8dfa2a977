"""LoRA on the rows of one slot, in plain torch.

Forward, for the rows x of one slot with adapter (A, B, scale, p):
    S = drop(x) Aᵀ                        (L, R)
    y += scale · S Bᵀ                     (L, O)
Backward, with dy the gradient of y:
    dS = scale · dy B                     (L, R)
    dB += scale · dyᵀ S                   (O, R), fp32, sample by sample in the job's order
    dA += dSᵀ drop(x)                     (R, D), fp32, likewise
    dx += drop(dS A)                      (L, D)
Only x, S and the dropout mask are kept. Products over rows run in windows of a fixed size (adapters/routing.py), which
may reach over the neighbours' rows, whose results are left unused, never masked by a product. Products over tokens (dA,
dB) touch one sample's rows alone. So a NaN in another segment or another slot changes nothing here.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, D in, O out, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing, SlotRows, Window
from weft.adapters.sample_sums import add_product, joined
from weft.kernels.dropout import drop, keep_mask

KeptRows = list[tuple[torch.Tensor, torch.Tensor | None]]
"""S and the dropout mask of every window."""


@dataclass
class LoraWeights(SlotWeights):
    """The adapter on one module: views into its flat buffers."""

    a_RD: torch.Tensor
    b_OR: torch.Tensor
    grad_a_RD: torch.Tensor
    """Empty where A is frozen."""
    grad_b_OR: torch.Tensor
    scale: float
    dropout: float
    key: int
    """Stable number of the module, part of every dropout key."""
    first_input: int
    """The place of x's first feature among all of the module's, where other devices have others."""

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> KeptRows:
        """y += scale · drop(x) Aᵀ Bᵀ."""
        a_RD, b_OR = self.compute_weights(x_TD.dtype)
        a_DR, b_RO = a_RD.t(), b_OR.t()
        kept: KeptRows = []
        for window in rows.windows:
            keep_LD = self.keep(window, routing, x_TD.shape[1])
            s_LR = self.dropped(x_TD[window.computed], keep_LD).mm(a_DR)
            y_TO[window.own].add_(s_LR.mm(b_RO)[window.inside], alpha=self.scale)
            kept.append((s_LR[window.inside], keep_LD))
        return kept

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: KeptRows
    ) -> None:
        """Adds to dA, dB and dx."""
        a_RD, b_OR = self.compute_weights(dy_TO.dtype)
        inputs, gradients = [], []
        for window, (_, keep_LD) in zip(rows.windows, kept, strict=True):
            ds_LR = dy_TO[window.computed].mm(b_OR).mul_(self.scale)
            if self.grad_a_RD.numel():
                inputs.append(self.dropped(x_TD[window.computed], keep_LD)[window.inside])
            gradients.append(ds_LR[window.inside])
            if dx_TD is not None:
                dx_TD[window.own].add_(self.dropped(ds_LR.mm(a_RD), keep_LD)[window.inside])
        shrunk = [s_LR for s_LR, _ in kept]
        x_LD = joined(inputs) if inputs else x_TD[rows.own]
        self.accumulate(rows, x_LD, joined(shrunk), joined(gradients), dy_TO)

    def accumulate(
        self, rows: SlotRows, x_LD: torch.Tensor, s_LR: torch.Tensor, ds_LR: torch.Tensor, dy_TO: torch.Tensor
    ) -> None:
        """Adds dA and dB sample by sample: a sum whose order no microbatch cut can change."""
        for sample in rows.samples:
            dy_LO, own = dy_TO[sample.buffer], sample.slot
            add_product(self.grad_b_OR, dy_LO, s_LR[own], self.scale)
            if self.grad_a_RD.numel():
                add_product(self.grad_a_RD, ds_LR[own], x_LD[own], 1.0)

    def compute_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B in the type of the activations."""
        if dtype is torch.float32:
            return self.a_RD, self.b_OR
        return self.a_RD.to(dtype), self.b_OR.to(dtype)

    def keep(self, window: Window, routing: Routing, num_features: int) -> torch.Tensor | None:
        """The dropout mask of a window on this module; None where nothing is dropped."""
        if self.dropout == 0 or routing.dropout_keys_T is None:
            return None
        return keep_mask(
            routing.dropout_keys_T[window.computed], self.key, num_features, self.dropout, first=self.first_input
        )

    def dropped(self, x_LD: torch.Tensor, keep_LD: torch.Tensor | None) -> torch.Tensor:
        """The rows with the dropout mask, if there is one."""
        return x_LD if keep_LD is None else drop(x_LD, keep_LD, self.dropout)
