"""IA³ (Liu et al. 2022): a frozen linear whose outputs, or in feed-forward modules whose inputs, are scaled one by one.

Per adapted module W (out, in) one vector l: (out, 1), or (1, in) in a feed-forward module. It starts at 1, where it
changes nothing. Kernels read the vectors themselves; there are none for scaled inputs that several modules share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from weft.kernels.methods.parts import ColumnChange, OtherParts
from weft.methods.ia3.files import Ia3Files
from weft.methods.ia3.weights import InputScale, OutputScale
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class Ia3(Method):
    """The method `ia3`."""

    attachment = Attachment.LINEAR
    groups: tuple[str, ...] = ("l",)
    files: PeftFormat = Ia3Files()
    kernel_keeps: Keeps = "outputs"
    kernel_changes: tuple[Change, ...] = (("outputs", "qkv"), ("inputs", "down"))

    def has_kernels(self, spec: AdapterSpec) -> bool:
        """Where outputs are scaled, or the inputs of the module that widens nothing back."""
        named = spec.feedforward_modules
        return named is None or (not isinstance(named, str) and set(named) <= {"down_proj"})

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

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """The vectors and their gradients."""
        copy = KernelCopy(adapter)
        outputs = {p: w for p, w in adapter.modules.items() if isinstance(w, OutputScale)}
        inputs = {p: w for p, w in adapter.modules.items() if isinstance(w, InputScale)}
        copy.others = OtherParts(
            {p: ColumnChange(w.l_O1.view(-1), grad_factor_N=w.grad_l_O1.view(-1)) for p, w in outputs.items()},
            {p: ColumnChange(w.l_1D.view(-1), grad_factor_N=w.grad_l_1D.view(-1)) for p, w in inputs.items()},
        )
        return copy

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """W ⊙ l, and b ⊙ l where outputs are scaled."""
        (scale,) = tensors
        scale, weight_OD, bias_O = scale.float().to(linear.weight.device), linear.weight, linear.bias
        weight_OD.copy_((weight_OD.float() * scale).to(weight_OD.dtype))
        if bias_O is not None and not spec.is_feedforward(path):
            bias_O.copy_((bias_O.float() * scale.flatten()).to(bias_O.dtype))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """The outputs before they were scaled."""
        return 0 if spec.is_feedforward(path) else linear[0]

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Its weights are fewer than those of a LoRA of rank 1, the smallest the models know."""
        return CostRanks(1, 1)


METHODS: dict[str, Method] = {"ia3": Ia3()}
