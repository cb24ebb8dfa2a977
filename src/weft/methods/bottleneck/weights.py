"""A bottleneck on the rows of one slot, in plain torch.

Forward, for a block's output x with D (W, D) down, b, U (D, W) up, c, the non-linearity f and a scale:
    a = x Dᵀ + b                          (L, W)
    y = x + scale · (f(a) Uᵀ + c)         (L, D)
Backward, with dy the gradient of y, which dx holds already:
    da = scale · (dy U) ⊙ f'(a)           (L, W)
    dU += scale · dyᵀ f(a),  dc += scale · Σ dy,  dD += daᵀ x,  db += Σ da: fp32, sample by sample in the job's order
    dx += da D                            (L, D)
Only a is kept; f(a) is made again. Products over rows run in windows of a fixed size (adapters/routing.py); where these
reach over neighbours' rows, the results are left unused. So a NaN of another slot changes nothing here.

Shape suffixes: T rows of the microbatch, L rows of a window, a slot or a sample, D width of the residual stream, W of
the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.adapters.method import ModuleTensors, SlotWeights
from weft.adapters.routing import Routing, SlotRows
from weft.adapters.sample_sums import add_product, joined
from weft.kernels.methods.parts import Activation


@dataclass
class BottleneckWeights(SlotWeights):
    """The adapter on one block: views into its flat buffers."""

    params: ModuleTensors
    """D, b, U and c."""
    grads: ModuleTensors
    activation: Activation
    scale: float

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> list[torch.Tensor]:
        """Adds the bottleneck's output to y; keeps a of every window."""
        down_WD, bias_W, up_DW, bias_D = (param.to(x_TD.dtype) for param in self.params)
        kept = []
        for window in rows.windows:
            a_LW = x_TD[window.computed].mm(down_WD.t()).add_(bias_W)
            added_LD = self._inner(a_LW).mm(up_DW.t()).add_(bias_D)
            y_TO[window.own].add_(added_LD[window.inside], alpha=self.scale)
            kept.append(a_LW[window.inside])
        return kept

    def backward(
        self,
        x_TD: torch.Tensor,
        dy_TO: torch.Tensor,
        dx_TD: torch.Tensor | None,
        rows: SlotRows,
        kept: list[torch.Tensor],
    ) -> None:
        """Adds to all four gradients and to dx."""
        down_WD, _, up_DW, _ = (param.to(dy_TO.dtype) for param in self.params)
        gradients = []
        for window, a_LW in zip(rows.windows, kept, strict=True):
            d_inner_LW = dy_TO[window.computed].mm(up_DW).mul_(self.scale)
            # Rows of others stay zero: theirs may be NaN, and the product below has its fixed number of rows.
            da_LW = torch.zeros_like(d_inner_LW)
            slope_LW = self.activation.derivative(a_LW.float()).to(a_LW.dtype)
            da_LW[window.inside] = d_inner_LW[window.inside] * slope_LW
            gradients.append(da_LW[window.inside])
            if dx_TD is not None:
                dx_TD[window.own].add_(da_LW.mm(down_WD)[window.inside])
        self._accumulate(rows, x_TD, self._inner(joined(kept)), joined(gradients), dy_TO)

    def _accumulate(
        self, rows: SlotRows, x_TD: torch.Tensor, inner_LW: torch.Tensor, da_LW: torch.Tensor, dy_TD: torch.Tensor
    ) -> None:
        """Adds to the gradients sample by sample: a sum whose order no microbatch cut can change."""
        grad_down_WD, grad_bias_W, grad_up_DW, grad_bias_D = self.grads
        for sample in rows.samples:
            own, dy_LD = sample.slot, dy_TD[sample.buffer]
            add_product(grad_down_WD, da_LW[own], x_TD[sample.buffer], 1.0)
            grad_bias_W.add_(da_LW[own].float().sum(dim=0))
            add_product(grad_up_DW, dy_LD, inner_LW[own], self.scale)
            grad_bias_D.add_(dy_LD.float().sum(dim=0), alpha=self.scale)

    def _inner(self, a_LW: torch.Tensor) -> torch.Tensor:
        """f(a) in the type of the activations."""
        return self.activation.apply(a_LW.float()).to(a_LW.dtype)
