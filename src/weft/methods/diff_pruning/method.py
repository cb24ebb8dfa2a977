"""Diff pruning (Guo et al. 2021): a frozen linear plus a sparse difference, x (W + Δ)ᵀ.

Δ lives on a fixed share of W's positions, the smallest in size (`positions.py`), and its values on them are one vector.
With `mask: l0` each position has a gate besides (`gates.py`), and every open one adds `l0_weight` to the loss; gates
learn ten times as fast as values, which start at zero and are small. Files hold positions and values; what is merged
is W + Δ, exactly. There are no kernels for gates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from weft.adapters.method import (
    Attachment,
    Change,
    CostRanks,
    Keeps,
    KernelCopy,
    LinearShape,
    Method,
    ModuleTensors,
    PeftFormat,
    Place,
    SlotWeights,
)
from weft.kernels.dropout import module_key
from weft.methods.diff_pruning import gates
from weft.methods.diff_pruning.files import DiffPruningFiles
from weft.methods.diff_pruning.kernel_copy import SparseCopy
from weft.methods.diff_pruning.positions import num_positions
from weft.methods.diff_pruning.weights import BLOCK, GatedDifference, SparseDifference
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter

GATE_RATE = 10.0
"""Learning rate of gates over that of values."""
_RANK_OF_DENSE = 5400
"""The rank at which a LoRA on all linears has as many numbers as a model of width 8192; fewer where it is narrower."""


class DiffPruning(Method):
    """The method `diff_pruning`."""

    attachment = Attachment.LINEAR
    groups: tuple[str, ...] = ("values", "gates")
    kernel_keeps: Keeps = "sparse"
    kernel_changes: tuple[Change, ...] = tuple(("sparse", role) for role in ("qkv", "out", "gate_up", "down"))
    workspace_bytes = 4 * 4 * BLOCK
    """Δ in two types, G and its product, of one block."""
    files: PeftFormat = DiffPruningFiles()

    def has_kernels(self, spec: AdapterSpec) -> bool:
        """Where no gates are drawn."""
        return spec.mask == "magnitude"

    def kernel_bytes(self, spec: AdapterSpec, modules: Mapping[str, LinearShape], each: int) -> int:
        """Six numbers of four bytes for each position: where it is, in both orders."""
        return 24 * sum(num_positions(spec.density, math.prod(shape)) for shape in modules.values())

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """One value for each position, and one gate."""
        number = num_positions(spec.density, math.prod(linear))
        return ((number,),) if spec.mask == "magnitude" else ((number,), (number,))

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """No difference, and gates that are mostly open."""
        (number,), *gated = self.shapes(spec, path, (place.out_features, place.in_features))
        return torch.zeros(number), *(torch.full(shape, gates.START) for shape in gated)

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """What a slot of one linear holds."""
        if spec.mask == "magnitude":
            return SparseDifference(place, params, grads)
        return GatedDifference(place, params, grads, spec.l0_weight, module_key(path))

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        """Gates learn faster."""
        return (1.0,) if job.adapter.mask == "magnitude" else (1.0, GATE_RATE)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """The positions sorted both ways."""
        return SparseCopy(adapter, cast(dict[str, SparseDifference], adapter.modules))

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """W + Δ."""
        indices, _, values = (tensor.to(linear.weight.device) for tensor in tensors)
        weight_OD = linear.weight
        rows, columns = indices.long() // weight_OD.shape[1], indices.long() % weight_OD.shape[1]
        weight_OD[rows, columns] = (weight_OD[rows, columns].float() + values.float()).to(weight_OD.dtype)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """By its numbers, on a model of width 8192. Narrower models have fewer, so it costs no more than this there."""
        per_position = 1 if spec.mask == "magnitude" else 2
        rank = max(1, math.ceil(per_position * spec.density * _RANK_OF_DENSE))
        return CostRanks(rank, rank)


METHODS: dict[str, Method] = {"diff_pruning": DiffPruning()}
