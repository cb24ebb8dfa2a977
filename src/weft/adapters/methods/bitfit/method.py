"""BitFit (Ben Zaken et al. 2022): the biases of frozen linears are trained, and nothing else.

Per adapted module one vector (out,), what is added to the frozen bias; it starts at zero, where it changes nothing. A
linear without a bias is given one: most families of today have none. There are no kernels for it: on a fused backbone
its jobs run on the reference path.
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
from weft.adapters.methods.bitfit.files import BitFitFiles
from weft.adapters.methods.bitfit.weights import BiasChange
from weft.errors import AdapterFileError
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class BitFit(Method):
    """The method `bitfit`."""

    attachment = Attachment.LINEAR
    groups: tuple[str, ...] = ("bias",)
    has_kernels = False
    files: PeftFormat = BitFitFiles()

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
        """Fits every linear."""

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """One number per output."""
        return ((linear[0],),)

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """No change."""
        return (torch.zeros(place.out_features),)

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """What is added to the module's outputs."""
        return BiasChange(*params, *grads)

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        """The job's learning rate."""
        return (1.0,)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """Is never asked for."""
        raise AssertionError("BitFit has no kernels")

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """b + c; AdapterFileError where there is no b."""
        if linear.bias is None:
            raise AdapterFileError(f"{path} of the base has no bias that could hold what was trained.")
        change_O = tensors[0].float().to(linear.bias.device)
        linear.bias.copy_((linear.bias.float() + change_O).to(linear.bias.dtype))

    def kept_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """Nothing."""
        return 0

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Its weights are fewer than those of a LoRA of rank 1, the smallest the models know."""
        return CostRanks(1, 1)
