"""A sparse difference on the rows of one slot, in plain torch.

With the values v on the positions P of a weight W (O, D), and gates z, or 1 where there are none:
    y = x Wᵀ + x Δᵀ,  Δ = 0 but Δ[P] = z ⊙ v
    G = dyᵀ x (O, D):  dv += z ⊙ G[P],  dg += G[P] ⊙ v ⊙ dz/dg,  dx += dy Δ
G is computed sample by sample in the job's order, in fp32, and only its numbers on P are kept. Neither Δ nor G ever
exists as a whole: both are computed for some outputs at a time, at most `BLOCK` numbers. How a weight is cut depends on
its shape alone. Products over rows run in windows of a fixed size (adapters/routing.py), and no row of another slot is
used.

P is a share of the weight's numbers, those smallest in size: changing them disturbs least what the model knows already,
and the choice needs no data (Liao et al. 2023). It follows from the weight alone: a job that is resumed finds the same
positions, and no file has to keep them while it trains.

Gates open or close single positions by the hard concrete distribution (Louizos et al. 2018). A gate has one trained
number g. With u uniform in (0, 1), drawn for every optimizer step:
    s = sigmoid(g + log u - log(1 - u)),    z = min(1, max(0, 3 s - 1.5))
So z is often exactly 0 or 1, and in between dz/dg = 3 s (1 - s). It is above 0 with the probability sigmoid(g); their
sum over all gates is the expected number of open ones, which the penalty counts. Where nothing is drawn (evaluation,
answers, files), u is a half: a gate is open if g > 0. u is a hash of (job seed, job step, module, number of the gate):
no neighbour, microbatch or restart changes it.

Shape suffixes: T rows of the microbatch, L rows of a sample, D in, O out, B outputs of a block.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.adapters.method import ModuleTensors, Site, SlotWeights, frozen_weight
from weft.adapters.routing import Routing, SlotRows, add_product
from weft.kernels.device import is_gpu
from weft.kernels.dropout import mix


def num_positions(density: float, num_weights: int) -> int:
    """Number of positions of a weight that may change; at least one."""
    return max(1, round(density * num_weights))


@torch.no_grad()
def smallest_positions(weight_OD: torch.Tensor, number: int) -> torch.Tensor:
    """The positions of the smallest numbers in the flattened weight, ascending, int32. A quantised weight has many
    equal numbers. Of those at the limit, some are taken at even distances, so the choice depends on no sorting
    algorithm and is not concentrated in the first rows."""
    sizes = weight_OD.detach().float().abs().flatten()
    # On a GPU a whole sort is far quicker than looking for one number.
    limit = sizes.sort().values[number - 1] if is_gpu(sizes.device) else sizes.kthvalue(number).values
    below, equal = (sizes < limit).nonzero().flatten(), (sizes == limit).nonzero().flatten()
    missing = number - len(below)
    spread = torch.arange(missing, device=sizes.device) * len(equal) // missing
    return torch.cat([below, equal[spread]]).sort().values.to(torch.int32)


OPEN_GATE = 6.0
"""A g whose gate is exactly 1 if nothing is drawn; with the other sign, exactly 0."""
GATE_START = 1.0
"""Initial g: open more often than not, and seldom out of reach of gradients."""
_MASK = 0xFFFFFFFF
_STRIDE = 0x9E3779B1


def uniform(key: int, number: int, device: torch.device) -> torch.Tensor:
    """Random numbers in (0, 1), fp32: a pure function of the key and each one's index."""
    x = torch.arange(number, dtype=torch.int64, device=device).mul_(_STRIDE).add_(key & _MASK).bitwise_and_(_MASK)
    for factor, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
        # Only the lower 32 bits count, and these are right however the product overflows.
        x = (x ^ (x >> shift)).mul_(factor).bitwise_and_(_MASK)
    x = (x ^ (x >> 16)) >> 8
    return x.float().add_(0.5).mul_(2.0**-24)


def drawn_gates(g: torch.Tensor, key: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Z and dz/dg of every gate; without a key nothing is drawn."""
    noisy = g
    if key is not None:
        u = uniform(key, g.numel(), g.device)
        noisy = g + torch.log(u) - torch.log1p(-u)
    s = torch.sigmoid(noisy)
    stretched = 3.0 * s - 1.5
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0.0, 1.0), torch.where(inside, 3.0 * s * (1.0 - s), 0.0)


def gate_penalty_gradient(g: torch.Tensor) -> torch.Tensor:
    share = torch.sigmoid(g)
    return share * (1.0 - share)


BLOCK = 1 << 22
"""Numbers of Δ and of G in memory at once."""


@dataclass(frozen=True)
class _Block:
    outputs: slice
    own: slice
    shape: tuple[int, int]

    def inner(self, positions: torch.Tensor) -> torch.Tensor:
        first: int = self.outputs.start * self.shape[1]
        return positions[self.own].long() - first

    def dense(self, positions: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        delta = torch.zeros(self.shape[0] * self.shape[1], dtype=dtype, device=values.device)
        return delta.index_copy_(0, self.inner(positions), values[self.own].to(dtype)).view(self.shape)


@dataclass
class SparseDifference(SlotWeights):
    site: Site
    params: ModuleTensors
    """The values, and in a subclass g of their gates."""
    grads: ModuleTensors

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Indices of the values in the flattened weight: derived from it, or read from a file."""
        return smallest_positions(frozen_weight(self.site), self.params[0].numel())

    @functools.cached_property
    def _blocks(self) -> list[_Block]:
        num_out, num_in = self.site.out_features, self.site.in_features
        edges = [*range(0, num_out, max(1, BLOCK // num_in)), num_out]
        starts = torch.tensor(edges, device=self.positions.device) * num_in
        bounds = torch.searchsorted(self.positions.long(), starts).tolist()
        return [
            _Block(slice(*outputs), slice(*own), (outputs[1] - outputs[0], num_in))
            for outputs, own in zip(itertools.pairwise(edges), itertools.pairwise(bounds), strict=True)
        ]

    @property
    def _shape(self) -> torch.Tensor:
        return torch.tensor([self.site.out_features, self.site.in_features])

    def keep_from(self, before: SlotWeights) -> None:
        assert isinstance(before, SparseDifference)
        if "positions" in vars(before):
            self.positions = before.positions

    def in_files(self, params: ModuleTensors) -> ModuleTensors:
        return self.positions.to(params[0].device), self._shape, params[0]

    def from_files(self, given: ModuleTensors) -> ModuleTensors:
        """Takes the positions of a file; values at other positions, if the file has fewer, are zero."""
        indices, _, values = given
        taken, weight_OD, number = indices.to(torch.int32), frozen_weight(self.site), self.params[0].numel()
        candidates = smallest_positions(weight_OD, number).cpu()
        others = candidates[~torch.isin(candidates, taken)]
        positions = torch.cat([taken, others[: number - len(taken)]]).sort().values
        self.positions = positions.to(weight_OD.device)
        vars(self).pop("_blocks", None)
        return (torch.zeros(number).index_copy_(0, torch.searchsorted(positions, taken), values.float()),)

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> None:
        values, _ = self._difference(rows)
        for block in self._blocks:
            delta_DB = block.dense(self.positions, values, x_TD.dtype).t()
            for window in rows.windows:
                y_TO[window.own, block.outputs].add_(x_TD[window.computed].mm(delta_DB)[window.inside])

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: None
    ) -> None:
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
        """Δ at the positions, and its derivative by each of the parameters; None means 1."""
        return self.params[0], (None,)


@dataclass
class GatedDifference(SparseDifference):
    """The same with a gate at every position."""

    has_penalty: ClassVar[bool] = True

    gate_cost: float
    key: int
    """Stable number of the module, part of the random key."""

    def in_files(self, params: ModuleTensors) -> ModuleTensors:
        """The positions whose gates are open, and the gated values."""
        values, g = params
        z, _ = drawn_gates(g, None)
        is_open = z > 0
        return self.positions.to(values.device)[is_open], self._shape, (values * z)[is_open]

    def from_files(self, given: ModuleTensors) -> ModuleTensors:
        """Takes the positions of a file, with open gates; gates at other positions are closed."""
        (values,) = super().from_files(given)
        is_open = torch.isin(self.positions.cpu(), given[0])
        return values, torch.where(is_open, OPEN_GATE, -OPEN_GATE)

    def penalty_gradients(self) -> ModuleTensors:
        """Gradient of the expected number of open gates, times their cost; values have none."""
        values, g = self.params
        return torch.zeros_like(values), gate_penalty_gradient(g).mul_(self.gate_cost)

    def _difference(self, rows: SlotRows) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        values, g = self.params
        z, dz = drawn_gates(g, None if rows.step_key is None else mix(rows.step_key, self.key))
        return values * z, (z, values * dz)
