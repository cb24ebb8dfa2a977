"""A frozen linear with slots: y = x Wᵀ + b for all rows, plus each segment's own adapter on its own rows.

Forward, for segment s with rows x_s and adapter (A, B, scale, p):
    S = drop(x_s) Aᵀ                      (L, R)
    y_s += scale · S Bᵀ                   (L, O)
Backward, with dy the gradient of y:
    dS = scale · dy_s B                   (L, R)
    dB += scale · dy_sᵀ S                 (O, R), fp32, sample by sample in the job's order
    dA += dSᵀ drop(x_s)                   (R, D), fp32, likewise
    dx = dy W;  dx_s += drop(dS A)        (L, D)
Only x, S and the dropout mask are kept. Every product with adapter weights contracts over one segment's own rows, so a
NaN in another segment or another slot changes nothing here. Frozen products run in blocks of `row_tile` rows
(adapters/routing.py).

Shape suffixes: T rows of the microbatch, L rows of a segment, D in, O out, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.adapters.dropout import drop, keep_mask, mix
from weft.adapters.lora import LoraWeights
from weft.adapters.routing import Routing, Rows


class SlotLinear(nn.Module):
    """A frozen `nn.Linear` that any number of adapters can sit on at once."""

    def __init__(self, linear: nn.Linear, routing: Routing, anchor: torch.Tensor) -> None:
        super().__init__()
        self.weight_OD = nn.Parameter(linear.weight.detach(), requires_grad=False)
        self.bias_O = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.routing = routing
        self.anchor = anchor
        """A scalar that requires grad: it makes autograd visit slots even where the input needs no gradient."""
        self.slots: dict[int, LoraWeights] = {}

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, under the name transformers looks for."""
        return self.weight_OD

    @property
    def in_features(self) -> int:
        """D."""
        return self.weight_OD.shape[1]

    @property
    def out_features(self) -> int:
        """O."""
        return self.weight_OD.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X (..., D) to (..., O); the leading dimensions together are the rows of the microbatch."""
        x_TD = x.reshape(-1, x.shape[-1])
        active = [(rows, self.slots[rows.slot]) for rows in self.routing.segments if rows.slot in self.slots]
        anchor = self.anchor if active else self.anchor.detach()
        y_TO = _SlotLinearFunction.apply(x_TD, anchor, self.weight_OD, self.bias_O, active, self.routing.row_tile)
        return y_TO.view(*x.shape[:-1], self.out_features)  # type: ignore[no-any-return]


def tiled_mm(x_TK: torch.Tensor, w_KN: torch.Tensor, row_tile: int | None) -> torch.Tensor:
    """X W in blocks of `row_tile` rows; T is a multiple of it."""
    if row_tile is None or x_TK.shape[0] == row_tile:
        return torch.mm(x_TK, w_KN)
    assert x_TK.shape[0] % row_tile == 0, "rows are padded to whole tiles before they get here"
    y_TN = x_TK.new_empty(x_TK.shape[0], w_KN.shape[1])
    for start in range(0, x_TK.shape[0], row_tile):
        torch.mm(x_TK[start : start + row_tile], w_KN, out=y_TN[start : start + row_tile])
    return y_TN


class _SlotLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        anchor: torch.Tensor,
        weight_OD: torch.Tensor,
        bias_O: torch.Tensor | None,
        active: list[tuple[Rows, LoraWeights]],
        row_tile: int | None,
    ) -> torch.Tensor:
        y_TO = tiled_mm(x_TD, weight_OD.t(), row_tile)
        if bias_O is not None:
            y_TO += bias_O
        kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for rows, lora in active:
            a_RD, b_OR = lora.compute(x_TD.dtype)
            x_LD, keep_LD = x_TD[rows.start : rows.end], _keep(rows, lora, x_TD)
            s_LR = (x_LD if keep_LD is None else drop(x_LD, keep_LD, lora.dropout)) @ a_RD.t()
            y_TO[rows.start : rows.end].addmm_(s_LR, b_OR.t(), alpha=lora.scale)
            kept.append((s_LR, keep_LD))
        ctx.save_for_backward(x_TD if active else None, weight_OD)
        ctx.active, ctx.kept, ctx.row_tile = active, kept, row_tile
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x_TD, weight_OD = ctx.saved_tensors
        dy_TO = dy_TO.contiguous()
        dx_TD = tiled_mm(dy_TO, weight_OD, ctx.row_tile) if ctx.needs_input_grad[0] else None
        for (rows, lora), (s_LR, keep_LD) in zip(ctx.active, ctx.kept, strict=True):
            a_RD, b_OR = lora.compute(dy_TO.dtype)
            dy_LO, x_LD = dy_TO[rows.start : rows.end], x_TD[rows.start : rows.end]
            ds_LR = (dy_LO @ b_OR).mul_(lora.scale)
            lora.grad_b_OR.addmm_(dy_LO.t().float(), s_LR.float(), alpha=lora.scale)
            if keep_LD is None:
                lora.grad_a_RD.addmm_(ds_LR.t().float(), x_LD.float())
                if dx_TD is not None:
                    dx_TD[rows.start : rows.end].addmm_(ds_LR, a_RD)
                continue
            lora.grad_a_RD.addmm_(ds_LR.t().float(), drop(x_LD, keep_LD, lora.dropout).float())
            if dx_TD is not None:
                dx_TD[rows.start : rows.end] += drop(ds_LR @ a_RD, keep_LD, lora.dropout)
        return dx_TD, None, None, None, None, None


def _keep(rows: Rows, lora: LoraWeights, x_TD: torch.Tensor) -> torch.Tensor | None:
    """The segment's dropout mask on this module; None where nothing is dropped."""
    if lora.dropout == 0 or rows.dropout_key is None:
        return None
    key = mix(rows.dropout_key, lora.key)
    return keep_mask(key, rows.end - rows.start, x_TD.shape[1], lora.dropout, x_TD.device)
