"""A frozen linear with slots: y = x Wᵀ + b for all rows, and each job's own adapter on its own rows.

Forward: the frozen product of x, in which a method may have changed its rows, then each slot's method on y.
Backward: dx = dy W, where a method may have changed its rows of dy, then each slot's method on its gradients and dx.
What a method does is written in its `SlotWeights`. Products over rows run in blocks of a fixed size, so that a row's
result does not depend on its neighbours, and a NaN in another segment or another slot changes nothing here.

Shape suffixes: T rows of the microbatch, D in, O out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.adapters.frozen import Dense, FrozenWeight
from weft.adapters.frozen import tiled_mm as tiled_mm
from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing, SlotRows

Active = list[tuple[SlotRows, SlotWeights]]
"""The slots with rows in the microbatch and an adapter on this linear."""


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
        self.slots: dict[int, SlotWeights] = {}

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
        active: Active,
        routing: Routing,
    ) -> torch.Tensor:
        y_TO = frozen.product(_changed_input(x_TD, active), routing.row_tile)
        if bias_O is not None:
            y_TO += bias_O
        ctx.kept = [weights.forward(x_TD, y_TO, rows, routing) for rows, weights in active]
        # The weight is among the saved so that autograd refuses one that was changed in between.
        ctx.save_for_backward(x_TD if active else None, *frozen.stored.values())
        ctx.frozen, ctx.active, ctx.row_tile = frozen, active, routing.row_tile
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD = ctx.saved_tensors[0]
        dy_TO = dy_TO.contiguous()
        dx_TD = None
        if ctx.needs_input_grad[0] or any(weights.changes_input for _, weights in ctx.active):
            dx_TD = ctx.frozen.input_gradient(_changed_gradient(dy_TO, ctx.active), ctx.row_tile)
        for (rows, weights), kept in zip(ctx.active, ctx.kept, strict=True):
            weights.backward(x_TD, dy_TO, dx_TD, rows, kept)
        return dx_TD if ctx.needs_input_grad[0] else None, None, None, None, None, None


def _changed_input(x_TD: torch.Tensor, active: Active) -> torch.Tensor:
    """What the frozen product sees: x, or a copy in which some slots have changed their own rows."""
    changing = [(rows, weights) for rows, weights in active if weights.changes_input]
    if changing:
        x_TD = x_TD.clone()
    for rows, weights in changing:
        weights.change_input(x_TD, rows)
    return x_TD


def _changed_gradient(dy_TO: torch.Tensor, active: Active) -> torch.Tensor:
    """The gradient of the frozen product: dy, or a copy in which some slots have changed their own rows."""
    changing = [(rows, weights) for rows, weights in active if weights.changes_gradient]
    if changing:
        dy_TO = dy_TO.clone()
    for rows, weights in changing:
        weights.change_gradient(dy_TO, rows)
    return dy_TO
