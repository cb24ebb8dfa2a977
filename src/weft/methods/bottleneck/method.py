"""Bottleneck adapters (Houlsby et al. 2019, Pfeiffer et al. 2021): y + scale · (f(y Dᵀ + b) Uᵀ + c) on block outputs.

Per adapted block D (size, width) and b narrow its output y, and U (width, size) and c widen what the non-linearity f
leaves of it. `houlsby` puts one behind attention and MLP, `pfeiffer` behind the MLP alone; both before the block's
result is normed or added to the residual stream. U and c start at zero, where the adapter changes nothing. The size is
stated as such and not as a part of the model's width: it is what the adapter costs, on any model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

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
from weft.errors import ConfigError
from weft.kernels.methods.parts import ACTIVATIONS
from weft.methods.bottleneck.files import BottleneckFiles
from weft.methods.bottleneck.kernel_copy import BottleneckCopy
from weft.methods.bottleneck.weights import BottleneckWeights
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class Bottleneck(Method):
    """The method `bottleneck`."""

    attachment = Attachment.BLOCK_OUTPUT
    groups: tuple[str, ...] = ("down", "down_bias", "up", "up_bias")
    files: PeftFormat = BottleneckFiles()
    kernel_keeps: Keeps = "blocks"
    kernel_changes: tuple[Change, ...] = tuple(
        (kind, end) for kind in ("inner", "outputs") for end in ("attention", "mlp")
    )

    def has_kernels(self, spec: AdapterSpec) -> bool:
        return True

    def kernel_rank(self, spec: AdapterSpec) -> int:
        """Its size."""
        return spec.bottleneck_size

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
        """ConfigError if it would be wider than what it narrows."""
        for path, (width, _) in modules.items():
            if spec.bottleneck_size > width:
                raise ConfigError(
                    f"{spec.bottleneck_size} is above the width of {path} ({width}).", where="adapter.bottleneck_size"
                )

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """Of the two matrices and their biases."""
        width, size = linear[0], spec.bottleneck_size
        return (size, width), (size,), (width, size), (width,)

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """Uniform in ±1/sqrt(width) on the way down, as every torch Linear starts; zero on the way up."""
        down, *others = self.shapes(spec, path, (place.out_features, place.in_features))
        uniform = (torch.rand(down, generator=generator) * 2 - 1) / math.sqrt(place.in_features)
        return uniform, *(torch.zeros(shape) for shape in others)

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """What a slot of one block holds."""
        return BottleneckWeights(params, grads, ACTIVATIONS[spec.bottleneck_activation], spec.bottleneck_scale)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """The matrices as those of a LoRA, and what is around them."""
        return BottleneckCopy(adapter, dtype, cast(dict[str, BottleneckWeights], adapter.modules))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """What goes into the non-linearity."""
        return spec.bottleneck_size

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Half its size: on a layer's linears, a LoRA of rank r has more than 8 · width · r numbers, two bottlenecks
        little more than 4 · width · size."""
        rank = math.ceil(spec.bottleneck_size / 2)
        return CostRanks(rank, rank)


METHODS: dict[str, Method] = {"bottleneck": Bottleneck()}
