"""The operation of every site with slots: a frozen map for all rows, and each job's own adapter on its own rows.

Forward: the frozen map of x, in which a method may have changed its rows, then each slot's method on y.
Backward: the frozen map's gradient of dy, where a method may have changed its rows, then each slot's method on its
gradients and dx. What a method does is written in its `SlotWeights`. A NaN in another segment or another slot changes
nothing here.

Shape suffixes: T rows of the microbatch, D in, O out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing, SlotRows
from weft.kernels.lora.linears import LinearKernels

Active = list[tuple[SlotRows, SlotWeights]]
"""Slots with rows in the microbatch and an adapter at this site."""


class FrozenMap(Protocol):
    """A map of all rows: each row's result depends on that row alone."""

    @property
    def stored(self) -> Mapping[str, torch.Tensor]: ...

    def product(self, x_TD: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        """The mapped rows, in a new tensor."""

    def input_gradient(self, dy_TO: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        """The gradient of x, in a new tensor."""


def active_slots(slots: Mapping[int, SlotWeights], routing: Routing, others: Collection[int] = ()) -> Active:
    """The slots of a site that have rows in the current microbatch, in the order of the rows; `others`: those that
    kernels run."""
    return [(rows, slots[rows.slot]) for rows in routing.slots if rows.slot in slots and rows.slot not in others]


def apply_slots(
    x_TD: torch.Tensor,
    anchor: torch.Tensor,
    frozen: FrozenMap,
    bias_O: torch.Tensor | None,
    active: Active,
    routing: Routing,
    kernels: LinearKernels | None = None,
) -> torch.Tensor:
    """The frozen map of x with every active slot's adapter and those of kernels; `anchor` makes autograd visit it if it
    requires grad."""
    y_TO: torch.Tensor = _SlotFunction.apply(  # type: ignore[no-untyped-call]
        x_TD, anchor, frozen, bias_O, active, routing, kernels
    )
    return y_TO


class _SlotFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        anchor: torch.Tensor,
        frozen: FrozenMap,
        bias_O: torch.Tensor | None,
        active: Active,
        routing: Routing,
        kernels: LinearKernels | None,
    ) -> torch.Tensor:
        y_TO = frozen.product(_changed_input(x_TD, active), routing.row_tile)
        if bias_O is not None:
            y_TO += bias_O
        s_TR = None if kernels is None else kernels.forward(x_TD, y_TO)
        ctx.kept = [weights.forward(x_TD, y_TO, rows, routing) for rows, weights in active]
        # The weight is among the saved so that autograd refuses one that was changed in between.
        ctx.save_for_backward(x_TD if active or kernels else None, s_TR, *frozen.stored.values())
        ctx.kernels = kernels
        ctx.frozen, ctx.active, ctx.row_tile = frozen, active, routing.row_tile
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, s_TR, *_ = ctx.saved_tensors
        dy_TO = dy_TO.contiguous()
        dx_TD = None
        if ctx.needs_input_grad[0] or any(weights.changes_input for _, weights in ctx.active):
            dx_TD = ctx.frozen.input_gradient(_changed_gradient(dy_TO, ctx.active), ctx.row_tile)
        if ctx.kernels is not None:
            ctx.kernels.backward(x_TD, s_TR, dy_TO, dx_TD)
        for (rows, weights), kept in zip(ctx.active, ctx.kept, strict=True):
            weights.backward(x_TD, dy_TO, dx_TD, rows, kept)
            if weights.any_order_sums is not None:
                assert len(rows.samples) == 1, "order-independent sums are made of samples"
                weights.any_order_sums.take_sample()
        return dx_TD if ctx.needs_input_grad[0] else None, None, None, None, None, None, None


def _changed_input(x_TD: torch.Tensor, active: Active) -> torch.Tensor:
    changing = [(rows, weights) for rows, weights in active if weights.changes_input]
    if changing:
        x_TD = x_TD.clone()
    for rows, weights in changing:
        weights.change_input(x_TD, rows)
    return x_TD


def _changed_gradient(dy_TO: torch.Tensor, active: Active) -> torch.Tensor:
    changing = [(rows, weights) for rows, weights in active if weights.changes_gradient]
    if changing:
        dy_TO = dy_TO.clone()
    for rows, weights in changing:
        weights.change_gradient(dy_TO, rows)
    return dy_TO
