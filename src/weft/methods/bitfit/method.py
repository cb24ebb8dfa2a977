"""BitFit (Ben Zaken et al. 2022): the biases of frozen linears are trained, and nothing else.

Per adapted module one vector (out,), what is added to the frozen bias; it starts at zero, where it changes nothing. A
linear without a bias is given one: most families of today have none. Kernels read the vectors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from weft.errors import AdapterFileError
from weft.kernels.methods.parts import ColumnChange, OtherParts
from weft.methods.bitfit.files import BitFitFiles
from weft.methods.bitfit.weights import BiasChange
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class BitFit(Method):
    """The method `bitfit`."""

    attachment = Attachment.LINEAR
    groups: tuple[str, ...] = ("bias",)
    files: PeftFormat = BitFitFiles()
    kernel_keeps: Keeps = "outputs"
    kernel_changes: tuple[Change, ...] = tuple(("outputs", role) for role in ("qkv", "out", "gate_up", "down"))

    def has_kernels(self, spec: AdapterSpec) -> bool:
        return True

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
        return BiasChange(params[0], grads[0], place.share.adds_once)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """The vectors and their gradients; nothing is added, and nobody learns, where another device adds them."""
        copy = KernelCopy(adapter)
        own = cast(dict[str, BiasChange], adapter.modules)
        pairs = {p: (w.change_O, w.grad_O) for p, w in own.items()}
        elsewhere = {p: pair for p, pair in pairs.items() if not own[p].is_added}
        pairs |= {p: (torch.zeros_like(x), torch.zeros_like(grad)) for p, (x, grad) in elsewhere.items()}
        copy.others = OtherParts({p: ColumnChange(shift_N=x, grad_shift_N=grad) for p, (x, grad) in pairs.items()})
        return copy

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """b + c; AdapterFileError where there is no b."""
        if linear.bias is None:
            raise AdapterFileError(f"{path} of the base has no bias that could hold what was trained.")
        change_O = tensors[0].float().to(linear.bias.device)
        linear.bias.copy_((linear.bias.float() + change_O).to(linear.bias.dtype))

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Its weights are fewer than those of a LoRA of rank 1, the smallest the models know."""
        return CostRanks(1, 1)


METHODS: dict[str, Method] = {"bitfit": BitFit()}
