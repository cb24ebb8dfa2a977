"""The operation of every site with slots: a frozen map for all rows, and each job's own adapter on its own rows.

Forward: the frozen map of x, in which a method may have changed its rows, then each slot's method on y.
Backward: the frozen map's gradient of dy, where a method may have changed its rows, then each slot's method on its
gradients and dx. What a method does is written in its `SlotWeights`. A NaN in another segment or another slot changes
nothing here.

This visits slot after slot and sample after sample; on a GPU the host then takes longer than the device. `SlotKernels`
runs LoRA at single linears for all slots in a few launches. Models that the fused path does not know keep their own
modules, but their linears can use its kernels: those of `kernels/lora/` read from tables which rows are whose. Adapters
of other methods, and other sites, stay as they are.

Shape suffixes: T rows of the microbatch, D in, O out, R rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing, SlotRows
from weft.kernels.lora.linears import KernelRows, LinearKernels
from weft.kernels.lora.tables import SampleRows, Site, SlotTable, TableSizes, row_tables

if TYPE_CHECKING:
    from weft.adapters.sites import SlotLinear

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


_WHOLE_VECTOR = 16
"""Kernels read rows in whole vectors."""


class SlotKernels:
    def __init__(self, linears: Mapping[str, SlotLinear], device: torch.device, dtype: torch.dtype) -> None:
        fitting = {path: linear for path, linear in linears.items() if _fits(linear)}
        self._modules = {path: number for number, path in enumerate(fitting)}
        for path, linear in fitting.items():
            linear.kernel_site = Site(self._modules[path], (linear.out_features,), linear.in_features, "linear")
        sites = [linear.kernel_site for linear in fitting.values() if linear.kernel_site is not None]
        self._table = SlotTable(sites, device)
        self._adapters: dict[int, Adapter] = {}
        self._dtype = dtype

    def take_slot(self, adapter: Adapter) -> int | None:
        """The number of a slot whose adapter kernels run from now on; None if they cannot."""
        if not adapter.method.has_kernels(adapter.spec):
            return None
        copy = adapter.method.kernel_copy(adapter, self._dtype)
        if any(vars(copy.others).values()):
            return None
        entries = {self._modules[path]: entry for path, entry in copy.entries.items() if path in self._modules}
        slot = self._table.put(entries)
        adapter.kernel_copy, self._adapters[slot] = copy, adapter
        return slot

    def free_slot(self, slot: int) -> None:
        """Frees a slot, if it is one of these."""
        if slot in self._adapters:
            self._table.remove(slot)
            self._adapters.pop(slot).kernel_copy = None

    def rows(
        self, spans: Sequence[SampleRows], num_rows: int, keys_T: torch.Tensor, *, drops: bool
    ) -> KernelRows | None:
        """The rows of a microbatch for kernels; None if none of its adapters is theirs."""
        slots = tuple(dict.fromkeys(span.slot for span in spans if span.slot in self._adapters))
        for slot in slots:
            copy = self._adapters[slot].kernel_copy
            assert copy is not None
            copy.follow()
        if not slots:
            return None
        own = [span for span in spans if span.slot in self._adapters]
        tables = row_tables(own, TableSizes(num_rows, len(own)), keys_T, drops=drops)
        return KernelRows(self._table, tables, slots)


def _fits(linear: SlotLinear) -> bool:
    is_whole = linear.out_features % _WHOLE_VECTOR == 0 and linear.in_features % _WHOLE_VECTOR == 0
    return is_whole and linear.share.devices is None
