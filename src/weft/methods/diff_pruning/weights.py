"""A sparse difference on the rows of one slot, in plain torch.

With the values v on the positions P of a weight W (O, D), and gates z, or 1 where there are none:
    y = x Wᵀ + x Δᵀ,  Δ = 0 but Δ[P] = z ⊙ v
    G = dyᵀ x (O, D):  dv += z ⊙ G[P],  dg += G[P] ⊙ v ⊙ dz/dg,  dx += dy Δ
G is made sample by sample in the job's order, in fp32, and only its numbers on P are kept. Neither Δ nor G is ever
there as a whole: both are made of some outputs at a time, at most `BLOCK` numbers. How a weight is cut depends on its
shape alone. Products over rows run in windows of a fixed size (adapters/routing.py), and no row of another slot is
used.

Shape suffixes: T rows of the microbatch, L rows of a sample, D in, O out, B outputs of a block.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.adapters.method import ModuleTensors, Place, SlotWeights
from weft.adapters.routing import Routing, SlotRows
from weft.adapters.sample_sums import add_product
from weft.kernels.dropout import mix
from weft.methods.diff_pruning import gates
from weft.methods.diff_pruning.positions import smallest_positions, with_others

BLOCK = 1 << 22
"""Numbers of Δ and of G that are there at once."""


@dataclass(frozen=True)
class _Block:
    """Some outputs of a weight and the positions in them."""

    outputs: slice
    own: slice
    """Of all positions, those here."""
    shape: tuple[int, int]

    def inner(self, positions: torch.Tensor) -> torch.Tensor:
        """Where its positions are among the block's own numbers."""
        first: int = self.outputs.start * self.shape[1]
        return positions[self.own].long() - first

    def dense(self, positions: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Δ of these outputs."""
        delta = torch.zeros(self.shape[0] * self.shape[1], dtype=dtype, device=values.device)
        return delta.index_copy_(0, self.inner(positions), values[self.own].to(dtype)).view(self.shape)


@dataclass
class SparseDifference(SlotWeights):
    """The difference to one weight: views into the adapter's flat buffers."""

    place: Place
    params: ModuleTensors
    """The values, and in a subclass g of their gates."""
    grads: ModuleTensors

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Where the values are in the flattened weight: as follows from it, or as a file said."""
        return smallest_positions(self._weight, self.params[0].numel())

    @functools.cached_property
    def _blocks(self) -> list[_Block]:
        num_out, num_in = self.place.out_features, self.place.in_features
        edges = [*range(0, num_out, max(1, BLOCK // num_in)), num_out]
        starts = torch.tensor(edges, device=self.positions.device) * num_in
        bounds = torch.searchsorted(self.positions.long(), starts).tolist()
        return [
            _Block(slice(*outputs), slice(*own), (outputs[1] - outputs[0], num_in))
            for outputs, own in zip(itertools.pairwise(edges), itertools.pairwise(bounds), strict=True)
        ]

    @property
    def _shape(self) -> torch.Tensor:
        """Of the weight, for files."""
        return torch.tensor([self.place.out_features, self.place.in_features])

    @property
    def _weight(self) -> torch.Tensor:
        weight_OD = self.place.weight
        assert weight_OD is not None, "it sits on linears"
        return weight_OD

    def keep_from(self, before: SlotWeights) -> None:
        """The positions stay what they were."""
        assert isinstance(before, SparseDifference)
        if "positions" in vars(before):
            self.positions = before.positions

    def in_files(self, params: ModuleTensors) -> ModuleTensors:
        """The positions and the values on them."""
        return self.positions.to(params[0].device), self._shape, params[0]

    def from_files(self, given: ModuleTensors) -> ModuleTensors:
        """Takes the positions of a file as its own; the values on others, where the file has fewer, are zero."""
        indices, _, values = given
        where = self._take_positions(indices)
        return (torch.zeros(self.params[0].numel()).index_copy_(0, where, values.float()),)

    def _take_positions(self, given: torch.Tensor) -> torch.Tensor:
        """Makes the positions of a file part of its own; returns where they are among these."""
        weight_OD = self._weight
        candidates = smallest_positions(weight_OD, self.params[0].numel()).cpu()
        positions, where = with_others(given.to(torch.int32), candidates)
        self.positions = positions.to(weight_OD.device)
        vars(self).pop("_blocks", None)
        return where

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> None:
        """y += x Δᵀ."""
        values, _ = self._difference(rows)
        for block in self._blocks:
            delta_DB = block.dense(self.positions, values, x_TD.dtype).t()
            for window in rows.windows:
                y_TO[window.own, block.outputs].add_(x_TD[window.computed].mm(delta_DB)[window.inside])

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: None
    ) -> None:
        """Adds to dv, dg and dx."""
        values, slopes = self._difference(rows)
        for block in self._blocks:
            dy_TB = dy_TO[:, block.outputs]
            if dx_TD is not None:
                delta_BD = block.dense(self.positions, values, dy_TO.dtype)
                for window in rows.windows:
                    dx_TD[window.own].add_(dy_TB[window.computed].mm(delta_BD)[window.inside])
            inner = block.inner(self.positions)
            for sample in rows.samples:
                product_BD = torch.zeros(block.shape, device=dy_TO.device)
                add_product(product_BD, dy_TB[sample.buffer], x_TD[sample.buffer], 1.0)
                found = product_BD.view(-1)[inner]
                for grad, slope in zip(self.grads, slopes, strict=True):
                    grad[block.own].add_(found if slope is None else found * slope[block.own])

    def _difference(self, rows: SlotRows) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Δ on the positions, and its derivative by each of the parameters; None stands for 1."""
        return self.params[0], (None,)


@dataclass
class GatedDifference(SparseDifference):
    """The same with a gate on every position."""

    has_penalty: ClassVar[bool] = True

    gate_cost: float
    """What an open gate adds to the loss."""
    key: int
    """Stable number of the module, part of what is drawn."""

    def in_files(self, params: ModuleTensors) -> ModuleTensors:
        """The positions whose gates are open, and the values that pass."""
        values, g = params
        z, _ = gates.drawn(g, None)
        is_open = z > 0
        return self.positions.to(values.device)[is_open], self._shape, (values * z)[is_open]

    def from_files(self, given: ModuleTensors) -> ModuleTensors:
        """Takes the positions of a file, with open gates; those on others are closed."""
        (values,) = super().from_files(given)
        is_open = torch.isin(self.positions.cpu(), given[0])
        return values, torch.where(is_open, gates.OPEN, -gates.OPEN)

    def penalty_gradients(self) -> ModuleTensors:
        """Of the expected number of open gates, times what one costs; the values have none."""
        values, g = self.params
        return torch.zeros_like(values), gates.penalty_gradient(g).mul_(self.gate_cost)

    def _difference(self, rows: SlotRows) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        values, g = self.params
        z, dz = gates.drawn(g, None if rows.step_key is None else mix(rows.step_key, self.key))
        return values * z, (z, values * dz)
