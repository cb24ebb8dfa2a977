"""Diff pruning (Guo et al. 2021): a frozen linear plus a sparse difference, x (W + Δ)ᵀ.

Δ has values on a fixed share of W's positions, those smallest in size, and these values are one vector. With `mask: l0`
each position also has a gate, and every open one adds `l0_weight` to the loss; gates learn ten times as fast as values,
which start at zero and are small (`weights.py`). Files hold positions and values, and merging makes W + Δ, exactly;
PEFT has no such method. Kernels read the positions sorted by outputs and by inputs, with values in both orders; there
are no kernels for gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from weft.adapters.adapter import Adapter
from weft.adapters.method import (
    Change,
    CostRanks,
    Keeps,
    KernelCopy,
    LinearShape,
    Method,
    ModuleTensors,
    PeftFormat,
    Site,
    SlotWeights,
    weft_keys,
)
from weft.errors import AdapterFileError
from weft.kernels.dropout import module_key
from weft.kernels.methods.parts import OtherParts, SparsePart
from weft.methods.diff_pruning.weights import (
    BLOCK,
    GATE_START,
    GatedDifference,
    SparseDifference,
    num_positions,
)
from weft.spec import AdapterSpec, JobSpec


class SparseCopy(KernelCopy):
    def __init__(self, adapter: Adapter, modules: Mapping[str, SparseDifference]) -> None:
        super().__init__(adapter)
        sizes = [w.params[0].numel() for w in modules.values()]
        self._orders = torch.empty(sum(sizes), dtype=torch.int32, device=adapter.device)
        self._sorted = torch.empty(sum(sizes), device=adapter.device)
        found, first = {}, 0
        for (path, w), size in zip(modules.items(), sizes, strict=True):
            own = slice(first, first + size)
            found[path], order = _sorted_part(w, self._sorted[own])
            self._orders[own] = order + first
            first += size
        self.others = OtherParts(sparse=found)

    def copy_weights(self) -> None:
        torch.index_select(self._adapter.flat()["values"], 0, self._orders, out=self._sorted)


def _sorted_part(w: SparseDifference, in_values_V: torch.Tensor) -> tuple[SparsePart, torch.Tensor]:
    num_out, num_in = w.site.out_features, w.site.in_features
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
    """The index where each number from 0 on begins, then the end."""
    edges = torch.arange(number + 1, dtype=torch.int32, device=ascending.device)
    return torch.searchsorted(ascending, edges, out_int32=True)


class DiffPruningFiles(PeftFormat):
    peft_type = "DIFF_PRUNING"
    title = "diff pruning"
    own_settings = ("density", "mask")
    suffixes: Mapping[str, str] = {"indices": "diff.indices", "shape": "diff.shape", "values": "diff.values"}
    defaults: Mapping[str, Any] = weft_keys(peft_type, density=None, mask="magnitude")

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """As many values as indices, which ascend strictly, and no more than the density allows."""
        indices, shape, values = tensors
        if indices.dim() != 1 or indices.shape != values.shape or shape.numel() != 2:
            found = f"indices {tuple(indices.shape)} and values {tuple(values.shape)}"
            raise AdapterFileError(f"{path} has {found}; expected as many of both, and a shape of two.", where=where)
        size = int(shape[0]) * int(shape[1])
        bounded = torch.cat([torch.tensor([-1]), indices.long(), torch.tensor([size])])
        if not bool((bounded[1:] > bounded[:-1]).all()):
            raise AdapterFileError(f"{path} has indices that do not ascend from 0 to below {size}.", where=where)
        room = num_positions(spec.density, size)
        if len(indices) > room:
            raise AdapterFileError(f"{path} has {len(indices)} values; density allows {room}.", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        return int(tensors[1][0]), int(tensors[1][1])

    def summary(self, spec: AdapterSpec) -> str:
        most = "at most " if spec.mask == "l0" else ""
        return f"{most}{spec.density:.4%} of the adapted weights' numbers differ from those of the base"


GATE_RATE = 10.0
"""Ratio of the learning rates of gates and values."""
_RANK_OF_DENSE = 5400
"""Rank of a LoRA on all linears with as many numbers as a model of width 8192; narrower models have a smaller one."""


class DiffPruning(Method):
    groups: tuple[str, ...] = ("values", "gates")
    kernel_keeps: Keeps = "sparse"
    kernel_changes: tuple[Change, ...] = tuple(("sparse", role) for role in ("qkv", "out", "gate_up", "down"))
    workspace_bytes = 4 * 4 * BLOCK
    """Δ in two types, G and its product, of one block."""
    files: PeftFormat = DiffPruningFiles()

    def has_kernels(self, spec: AdapterSpec) -> bool:
        return spec.mask == "magnitude"

    def kernel_bytes(self, spec: AdapterSpec, modules: Mapping[str, LinearShape], each: int) -> int:
        """Six numbers of four bytes per position: its location in both orders."""
        return 24 * sum(num_positions(spec.density, math.prod(shape)) for shape in modules.values())

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        number = num_positions(spec.density, math.prod(linear))
        return ((number,),) if spec.mask == "magnitude" else ((number,), (number,))

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        (number,), *gated = self.shapes(spec, path, site.shape)
        return torch.zeros(number), *(torch.full(shape, GATE_START) for shape in gated)

    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        if spec.mask == "magnitude":
            return SparseDifference(site, params, grads)
        return GatedDifference(site, params, grads, spec.l0_weight, module_key(path))

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        return (1.0,) if job.adapter.mask == "magnitude" else (1.0, GATE_RATE)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        return SparseCopy(adapter, cast(dict[str, SparseDifference], adapter.modules))

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        indices, _, values = (tensor.to(linear.weight.device) for tensor in tensors)
        weight_OD = linear.weight
        rows, columns = indices.long() // weight_OD.shape[1], indices.long() % weight_OD.shape[1]
        weight_OD[rows, columns] = (weight_OD[rows, columns].float() + values.float()).to(weight_OD.dtype)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """The rank with as many numbers on a model of width 8192; narrower models cost less."""
        per_position = 1 if spec.mask == "magnitude" else 2
        rank = max(1, math.ceil(per_position * spec.density * _RANK_OF_DENSE))
        return CostRanks(rank, rank)


METHODS: dict[str, Method] = {"diff_pruning": DiffPruning()}
