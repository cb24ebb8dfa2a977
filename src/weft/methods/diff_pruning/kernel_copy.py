"""A sparse difference as kernels read it: its positions sorted by outputs and by inputs, with values in both orders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.adapters.method import KernelCopy
from weft.kernels.methods.parts import OtherParts, SparsePart
from weft.methods.diff_pruning.weights import SparseDifference

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class SparseCopy(KernelCopy):
    """What kernels read of one adapter; gradients are left where they belong."""

    def __init__(self, adapter: Adapter, modules: Mapping[str, SparseDifference]) -> None:
        """`modules`: by path."""
        super().__init__(adapter)
        sizes = [w.params[0].numel() for w in modules.values()]
        self._orders = torch.empty(sum(sizes), dtype=torch.int32, device=adapter.device)
        """Of the values of all modules, as they are sorted by inputs."""
        self._sorted = torch.empty(sum(sizes), device=adapter.device)
        found, first = {}, 0
        for (path, w), size in zip(modules.items(), sizes, strict=True):
            own = slice(first, first + size)
            found[path], order = _sorted_part(w, self._sorted[own])
            self._orders[own] = order + first
            first += size
        self.others = OtherParts(sparse=found)

    def copy_weights(self) -> None:
        """Sorts the values by inputs."""
        torch.index_select(self._adapter.flat()["values"], 0, self._orders, out=self._sorted)


def _sorted_part(w: SparseDifference, in_values_V: torch.Tensor) -> tuple[SparsePart, torch.Tensor]:
    """A module's difference, and the order of its positions by inputs."""
    num_out, num_in = w.place.out_features, w.place.in_features
    outputs, inputs = w.positions // num_in, w.positions % num_in
    order = torch.argsort(inputs, stable=True)
    part = SparsePart(
        outputs_V=outputs,
        inputs_V=inputs,
        values_V=w.params[0],
        grad_V=w.grads[0],
        out_starts=_starts(outputs, num_out),
        in_starts=_starts(inputs[order], num_in),
        in_outputs_V=outputs[order],
        in_values_V=in_values_V,
    )
    return part, order


def _starts(ascending: torch.Tensor, number: int) -> torch.Tensor:
    """Where each of the numbers from 0 on begins, and where all end."""
    edges = torch.arange(number + 1, dtype=torch.int32, device=ascending.device)
    return torch.searchsorted(ascending, edges, out_int32=True)
