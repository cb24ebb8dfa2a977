"""A frozen linear with slots: y = x Wᵀ + b for all rows, plus each job's own adapter on its own rows.

Forward, for the rows x of one slot with adapter (A, B, scale, p):
    S = drop(x) Aᵀ                        (L, R)
    y += scale · S Bᵀ                     (L, O)
Backward, with dy the gradient of y:
    dS = scale · dy B                     (L, R)
    dB += scale · dyᵀ S                   (O, R), fp32, sample by sample in the job's order
    dA += dSᵀ drop(x)                     (R, D), fp32, likewise
    dx = dy W;  dx += drop(dS A)          (L, D)
Only x, S and the dropout mask are kept. Products over rows run in blocks of a fixed size (adapters/routing.py); an
adapter's window may reach over its neighbours' rows, whose results are left unused, never masked by a product.
Products over tokens (dA, dB) touch one sample's rows alone. So a NaN in another segment or another slot changes nothing
here.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, D in, O out, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.adapters.frozen import Dense, FrozenWeight
from weft.adapters.frozen import tiled_mm as tiled_mm
from weft.adapters.lora import LoraWeights
from weft.adapters.routing import Routing, SlotRows, Window
from weft.kernels.dropout import drop, keep_mask


class SlotLinear(nn.Module):
    """A frozen `nn.Linear` that any number of adapters can sit on at once."""

    def __init__(self, linear: nn.Linear, routing: Routing, anchor: torch.Tensor) -> None:
        super().__init__()
        self.frozen: FrozenWeight = Dense.of(linear.weight)
        """W, however it is stored; a loader may put a quantised one in its place."""
        self.bias_O = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.routing = routing
        self.anchor = anchor
        """A scalar that requires grad: it makes autograd visit slots even where the input needs no gradient."""
        self.slots: dict[int, LoraWeights] = {}

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, under the name transformers looks for."""
        return self.frozen.dense()

    @property
    def in_features(self) -> int:
        """D."""
        return self.frozen.shape[1]

    @property
    def out_features(self) -> int:
        """O."""
        return self.frozen.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X (..., D) to (..., O); the leading dimensions together are the rows of the microbatch."""
        x_TD = x.reshape(-1, x.shape[-1])
        active = [(rows, self.slots[rows.slot]) for rows in self.routing.slots if rows.slot in self.slots]
        anchor = self.anchor if active else self.anchor.detach()
        y_TO: torch.Tensor = _SlotLinearFunction.apply(  # type: ignore[no-untyped-call]
            x_TD, anchor, self.frozen, self.bias_O, active, self.routing
        )
        return y_TO.view(*x.shape[:-1], self.out_features)


class _SlotLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        anchor: torch.Tensor,
        frozen: FrozenWeight,
        bias_O: torch.Tensor | None,
        active: list[tuple[SlotRows, LoraWeights]],
        routing: Routing,
    ) -> torch.Tensor:
        y_TO = frozen.product(x_TD, routing.row_tile)
        if bias_O is not None:
            y_TO += bias_O
        kept: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = []
        for rows, lora in active:
            a_RD, b_OR = lora.compute(x_TD.dtype)
            a_DR, b_RO = a_RD.t(), b_OR.t()
            kept.append([])
            for window in rows.windows:
                keep_LD = _keep(window, lora, routing, x_TD.shape[1])
                s_LR = _dropped(x_TD[window.computed], keep_LD, lora).mm(a_DR)
                y_TO[window.own].add_(s_LR.mm(b_RO)[window.inside], alpha=lora.scale)
                kept[-1].append((s_LR[window.inside], keep_LD))
        # The weight is among the saved so that autograd refuses one that was changed in between.
        ctx.save_for_backward(x_TD if active else None, *frozen.stored.values())
        ctx.frozen, ctx.active, ctx.kept, ctx.row_tile = frozen, active, kept, routing.row_tile
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD = ctx.saved_tensors[0]
        dy_TO = dy_TO.contiguous()
        dx_TD = ctx.frozen.input_gradient(dy_TO, ctx.row_tile) if ctx.needs_input_grad[0] else None
        for (rows, lora), kept in zip(ctx.active, ctx.kept, strict=True):
            a_RD, b_OR = lora.compute(dy_TO.dtype)
            inputs, gradients = [], []
            for window, (_, keep_LD) in zip(rows.windows, kept, strict=True):
                ds_LR = dy_TO[window.computed].mm(b_OR).mul_(lora.scale)
                inputs.append(_dropped(x_TD[window.computed], keep_LD, lora)[window.inside])
                gradients.append(ds_LR[window.inside])
                if dx_TD is not None:
                    dx_TD[window.own].add_(_dropped(ds_LR.mm(a_RD), keep_LD, lora)[window.inside])
            shrunk = [s_LR for s_LR, _ in kept]
            _accumulate(rows, lora, _joined(inputs), _joined(shrunk), _joined(gradients), dy_TO)
        return dx_TD, None, None, None, None, None


def _accumulate(
    rows: SlotRows,
    lora: LoraWeights,
    x_LD: torch.Tensor,
    s_LR: torch.Tensor,
    ds_LR: torch.Tensor,
    dy_TO: torch.Tensor,
) -> None:
    """Adds dA and dB sample by sample: a sum whose order no microbatch cut can change."""
    for sample in rows.samples:
        dy_LO, own = dy_TO[sample.buffer], sample.slot
        if dy_TO.dtype is torch.float32:
            lora.grad_b_OR.addmm_(dy_LO.t(), s_LR[own], alpha=lora.scale)
            lora.grad_a_RD.addmm_(ds_LR[own].t(), x_LD[own])
        else:
            _add_product(lora.grad_b_OR, dy_LO, s_LR[own], lora.scale)
            _add_product(lora.grad_a_RD, ds_LR[own], x_LD[own], 1.0)


def _add_product(grad: torch.Tensor, left_LM: torch.Tensor, right_LN: torch.Tensor, scale: float) -> None:
    """grad (M, N, fp32) += scale · leftᵀ right of half-precision factors, summed in fp32."""
    if left_LM.is_cuda:
        grad.add_(torch.mm(left_LM.t(), right_LN, out_dtype=torch.float32), alpha=scale)
    else:
        grad.addmm_(left_LM.t().float(), right_LN.float(), alpha=scale)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """All windows of a slot in one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _keep(window: Window, lora: LoraWeights, routing: Routing, num_features: int) -> torch.Tensor | None:
    """The dropout mask of a window on this module; None where nothing is dropped."""
    if lora.dropout == 0 or routing.dropout_keys_T is None:
        return None
    return keep_mask(routing.dropout_keys_T[window.computed], lora.key, num_features, lora.dropout)


def _dropped(x_LD: torch.Tensor, keep_LD: torch.Tensor | None, lora: LoraWeights) -> torch.Tensor:
    return x_LD if keep_LD is None else drop(x_LD, keep_LD, lora.dropout)
