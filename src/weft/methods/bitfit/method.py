"""BitFit (Ben Zaken et al. 2022): the biases of frozen linears are trained, and nothing else.

Per adapted module one vector c (out,) is added to the frozen bias; it starts at zero, where it changes nothing. A
linear without a bias, as in most families of today, gets one:
    y = x Wᵀ + b + c;    dc += Σ dy
The sum runs over the rows of one sample at a time, in fp32 and in the job's order. y is changed in fp32 and rounded
once. No row of another slot is read. Kernels read the vectors themselves. PEFT trains biases only beside a LoRA, so
only Weft reads the files.

Shape suffixes: T rows of the microbatch, L rows of a slot, D in, O out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from weft.adapters.adapter import Adapter
from weft.adapters.method import (
    Change,
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
from weft.adapters.routing import Routing, SlotRows
from weft.errors import AdapterFileError
from weft.kernels.methods.parts import ColumnChange, OtherParts
from weft.spec import AdapterSpec


@dataclass
class BiasChange(SlotWeights):
    """One number per output of a module: views into the adapter's flat buffer."""

    change_O: torch.Tensor
    grad_O: torch.Tensor
    is_added: bool
    """False if another device adds it to the sum."""

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> None:
        if not self.is_added:
            return
        own_LO = y_TO[rows.own]
        own_LO.copy_(own_LO.float() + self.change_O)

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: None
    ) -> None:
        for sample in rows.samples if self.is_added else ():
            self.grad_O.add_(dy_TO[sample.buffer].float().sum(dim=0))


class BitFitFiles(PeftFormat):
    """Files of changed biases: the differences, which start at zero."""

    peft_type = "BITFIT"
    title = "BitFit"
    suffixes: Mapping[str, str] = {"bias_change": "bias_change"}
    defaults: Mapping[str, Any] = weft_keys(peft_type)

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        shape = tuple(tensors[0].shape)
        if len(shape) != 1 or not shape[0]:
            raise AdapterFileError(f"{path} has bias_change {shape}; expected (out,).", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        return tensors[0].shape[0], None

    def summary(self, spec: AdapterSpec) -> str:
        return "only biases of linears differ from those of the base"


class BitFit(Method):
    groups: tuple[str, ...] = ("bias",)
    files: PeftFormat = BitFitFiles()
    kernel_keeps: Keeps = "outputs"
    kernel_changes: tuple[Change, ...] = tuple(("outputs", role) for role in ("qkv", "out", "gate_up", "down"))

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        return ((linear[0],),)

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        return (torch.zeros(site.out_features),)

    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        return BiasChange(params[0], grads[0], site.share.adds_once)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        copy = KernelCopy(adapter)
        own = cast(dict[str, BiasChange], adapter.modules)
        pairs = {p: (w.change_O, w.grad_O) for p, w in own.items()}
        elsewhere = {p: pair for p, pair in pairs.items() if not own[p].is_added}
        pairs |= {p: (torch.zeros_like(x), torch.zeros_like(grad)) for p, (x, grad) in elsewhere.items()}
        copy.others = OtherParts({p: ColumnChange(shift_N=x, grad_shift_N=grad) for p, (x, grad) in pairs.items()})
        return copy

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        if linear.bias is None:
            raise AdapterFileError(f"{path} of the base has no bias that could hold what was trained.")
        change_O = tensors[0].float().to(linear.bias.device)
        linear.bias.copy_((linear.bias.float() + change_O).to(linear.bias.dtype))


METHODS: dict[str, Method] = {"bitfit": BitFit()}
