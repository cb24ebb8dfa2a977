"""IA³ (Liu et al. 2022): a frozen linear whose outputs, or in feed-forward modules whose inputs, are scaled one by one.

Per adapted module W (out, in) one vector l: (out, 1), or (1, in) in a feed-forward module. It starts at 1, where it
changes nothing. There are no kernels for it: on a fused backbone its jobs run on the reference path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.adapters.method import (
    Attachment,
    CostRanks,
    KernelCopy,
    LinearShape,
    Method,
    ModuleTensors,
    PeftFormat,
    Place,
    SlotWeights,
)
from weft.adapters.methods.ia3.files import Ia3Files
from weft.adapters.methods.ia3.weights import InputScale, OutputScale
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class Ia3(Method):
    """The method `ia3`."""

    attachment = Attachment.LINEAR
    groups: tuple[str, ...] = ("l",)
    has_kernels = False
    files: PeftFormat = Ia3Files()

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
        """Fits every linear."""

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """Of l on one module."""
        return ((1, linear[1]) if spec.is_feedforward(path) else (linear[0], 1),)

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """Ones, or normal numbers where `init_ia3_weights` is false."""
        (shape,) = self.shapes(spec, path, (place.out_features, place.in_features))
        return (torch.ones(shape) if spec.init_ia3_weights else torch.randn(shape, generator=generator),)

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """What scales the module's inputs or outputs."""
        return InputScale(*params, *grads) if spec.is_feedforward(path) else OutputScale(*params, *grads)

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        """The job's learning rate."""
        return (1.0,)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """Is never asked for."""
        raise AssertionError("IA³ has no kernels")

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """W ⊙ l, and b ⊙ l where outputs are scaled."""
        (scale,) = tensors
        scale, weight_OD, bias_O = scale.float().to(linear.weight.device), linear.weight, linear.bias
        weight_OD.copy_((weight_OD.float() * scale).to(weight_OD.dtype))
        if bias_O is not None and not spec.is_feedforward(path):
            bias_O.copy_((bias_O.float() * scale.flatten()).to(bias_O.dtype))

    def kept_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """The outputs before they were scaled."""
        return 0 if spec.is_feedforward(path) else linear[0]

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Its weights are fewer than those of a LoRA of rank 1, the smallest the models know."""
        return CostRanks(1, 1)
