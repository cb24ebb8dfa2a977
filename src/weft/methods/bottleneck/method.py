"""Bottleneck adapters (Houlsby et al. 2019, Pfeiffer et al. 2021) on block outputs.

Per adapted block D (W, D) and b narrow its output x, and U (D, W) and c widen what the non-linearity f leaves of it.
`houlsby` puts one after attention and MLP, `pfeiffer` after the MLP alone; both before the block's result is normed or
added to the residual stream. U and c start at zero, where the adapter changes nothing. The size W is a setting of its
own and not a part of the model's width: it is what the adapter costs, on any model.

Forward:
    a = x Dᵀ + b                          (L, W)
    y = x + scale · (f(a) Uᵀ + c)         (L, D)
Backward, with dy the gradient of y, which dx holds already:
    da = scale · (dy U) ⊙ f'(a)           (L, W)
    dU += scale · dyᵀ f(a),  dc += scale · Σ dy,  dD += daᵀ x,  db += Σ da: fp32, sample by sample in the job's order
    dx += da D                            (L, D)
Only a is kept; f(a) is computed again. Products over rows run in windows of a fixed size (adapters/routing.py); where
these reach over neighbours' rows, the results are not used. So a NaN of another slot changes nothing here.

Kernels read D and scale · U as A and B of a LoRA after the block, and scale · c as a shift; b, f and their gradients
are in rank space (`kernels/methods/inner.py`). PEFT has no such method, so only Weft reads the files.

Shape suffixes: T rows of the microbatch, L rows of a window, a slot or a sample, D width of the residual stream, W of
the bottleneck, N numbers of all blocks, or of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from weft.adapters.adapter import Adapter
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
    Site,
    SlotWeights,
    weft_keys,
)
from weft.adapters.routing import Routing, SlotRows, add_product, joined
from weft.errors import AdapterFileError, ConfigError
from weft.kernels.methods.parts import ACTIVATIONS, Activation, ColumnChange, InnerChange, OtherParts
from weft.methods.lora.weights import ComputeCopy, LoraWeights
from weft.spec import AdapterSpec


@dataclass
class BottleneckWeights(SlotWeights):
    params: ModuleTensors
    """D, b, U and c."""
    grads: ModuleTensors
    activation: Activation
    scale: float

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> list[torch.Tensor]:
        down_WD, bias_W, up_DW, bias_D = (param.to(x_TD.dtype) for param in self.params)
        kept = []
        for window in rows.windows:
            a_LW = x_TD[window.computed].mm(down_WD.t()).add_(bias_W)
            added_LD = self._inner(a_LW).mm(up_DW.t()).add_(bias_D)
            y_TO[window.own].add_(added_LD[window.inside], alpha=self.scale)
            kept.append(a_LW[window.inside])
        return kept

    def backward(
        self,
        x_TD: torch.Tensor,
        dy_TO: torch.Tensor,
        dx_TD: torch.Tensor | None,
        rows: SlotRows,
        kept: list[torch.Tensor],
    ) -> None:
        down_WD, _, up_DW, _ = (param.to(dy_TO.dtype) for param in self.params)
        gradients = []
        for window, a_LW in zip(rows.windows, kept, strict=True):
            d_inner_LW = dy_TO[window.computed].mm(up_DW).mul_(self.scale)
            # Rows of others stay zero: theirs may be NaN, and the product below has its fixed number of rows.
            da_LW = torch.zeros_like(d_inner_LW)
            slope_LW = self.activation.derivative(a_LW.float()).to(a_LW.dtype)
            da_LW[window.inside] = d_inner_LW[window.inside] * slope_LW
            gradients.append(da_LW[window.inside])
            if dx_TD is not None:
                dx_TD[window.own].add_(da_LW.mm(down_WD)[window.inside])
        self._accumulate(rows, x_TD, self._inner(joined(kept)), joined(gradients), dy_TO)

    def _accumulate(
        self, rows: SlotRows, x_TD: torch.Tensor, inner_LW: torch.Tensor, da_LW: torch.Tensor, dy_TD: torch.Tensor
    ) -> None:
        """Adds to the gradients sample by sample, an order that no cut into microbatches changes."""
        grad_down_WD, grad_bias_W, grad_up_DW, grad_bias_D = self.grads
        for sample in rows.samples:
            own, dy_LD = sample.slot, dy_TD[sample.buffer]
            add_product(grad_down_WD, da_LW[own], x_TD[sample.buffer], 1.0)
            grad_bias_W.add_(da_LW[own].float().sum(dim=0))
            add_product(grad_up_DW, dy_LD, inner_LW[own], self.scale)
            grad_bias_D.add_(dy_LD.float().sum(dim=0), alpha=self.scale)

    def _inner(self, a_LW: torch.Tensor) -> torch.Tensor:
        return self.activation.apply(a_LW.float()).to(a_LW.dtype)


SHIFTS = "up_bias"


class BottleneckCopy(ComputeCopy):
    """An adapter's weights as kernels read them, and the gradients of scale · c."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, blocks: Mapping[str, BottleneckWeights]) -> None:
        products = {}
        for path, w in blocks.items():
            (down, _, up, _), (grad_down, _, grad_up, _) = w.params, w.grads
            products[path] = LoraWeights(down, up, grad_down, grad_up, w.scale, 0.0, 0, 0)
        super().__init__(adapter, dtype, products, ("down", "up"))
        self._outer_scale = adapter.spec.bottleneck_scale
        self._shifts_N, self._grad_shifts_N = (torch.zeros_like(adapter.flat()[SHIFTS]) for _ in range(2))
        """Shifts of all blocks, concatenated as in the adapter."""
        sizes = [w.params[3].numel() for w in blocks.values()]
        views = zip(blocks, self._shifts_N.split(sizes), self._grad_shifts_N.split(sizes), strict=True)
        self.others = OtherParts(
            outputs={path: ColumnChange(shift_N=shift_N, grad_shift_N=grad_N) for path, shift_N, grad_N in views},
            inner={p: InnerChange(w.params[1], w.grads[1], w.activation) for p, w in blocks.items()},
        )

    def copy_weights(self) -> None:
        super().copy_weights()
        torch.mul(self._adapter.flat()[SHIFTS], self._outer_scale, out=self._shifts_N)

    def collect(self) -> None:
        self._adapter.groups[SHIFTS].grad.add_(self._grad_shifts_N, alpha=self._outer_scale)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        self._grad_shifts_N.zero_()


class BottleneckFiles(PeftFormat):
    peft_type = "BOTTLENECK"
    title = "bottleneck"
    own_settings = ("bottleneck_size", "bottleneck_activation", "bottleneck_scale")
    suffixes: Mapping[str, str] = {
        "down": "down.weight",
        "down_bias": "down.bias",
        "up": "up.weight",
        "up_bias": "up.bias",
    }
    defaults: Mapping[str, Any] = weft_keys(
        peft_type, bottleneck_activation="silu", bottleneck_scale=1.0, bottleneck_size=None
    )

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        down, bias, up, up_bias = (tuple(tensor.shape) for tensor in tensors)
        size, width = spec.bottleneck_size, up_bias[0] if len(up_bias) == 1 else 0
        if (down, bias, up) != ((size, width), (size,), (width, size)) or not width:
            raise AdapterFileError(
                f"{path} has down {down} and up {up}; expected ({size}, width) and (width, {size}) with their biases.",
                where=where,
            )

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        return tensors[2].shape[0], tensors[0].shape[1]

    def summary(self, spec: AdapterSpec) -> str:
        return f"a layer of {spec.bottleneck_size} ({spec.bottleneck_activation}) after blocks of the model"


class Bottleneck(Method):
    attachment = Attachment.BLOCK_OUTPUT
    groups: tuple[str, ...] = ("down", "down_bias", "up", "up_bias")
    files: PeftFormat = BottleneckFiles()
    kernel_keeps: Keeps = "blocks"
    kernel_changes: tuple[Change, ...] = tuple(
        (kind, end) for kind in ("inner", "outputs") for end in ("attention", "mlp")
    )

    def kernel_rank(self, spec: AdapterSpec) -> int:
        return spec.bottleneck_size

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
        for path, (width, _) in modules.items():
            if spec.bottleneck_size > width:
                raise ConfigError(
                    f"{spec.bottleneck_size} is above the width of {path} ({width}).", where="adapter.bottleneck_size"
                )

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        width, size = linear[0], spec.bottleneck_size
        return (size, width), (size,), (width, size), (width,)

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        """Uniform in ±1/sqrt(width) for D, as in every torch Linear; zero for the rest."""
        down, *others = self.shapes(spec, path, site.shape)
        uniform = (torch.rand(down, generator=generator) * 2 - 1) / math.sqrt(site.in_features)
        return uniform, *(torch.zeros(shape) for shape in others)

    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        return BottleneckWeights(params, grads, ACTIVATIONS[spec.bottleneck_activation], spec.bottleneck_scale)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        return BottleneckCopy(adapter, dtype, cast(dict[str, BottleneckWeights], adapter.modules))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        return spec.bottleneck_size

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Half its size: on a layer's linears, a LoRA of rank r has more than 8 · width · r numbers, two bottlenecks
        little more than 4 · width · size."""
        rank = math.ceil(spec.bottleneck_size / 2)
        return CostRanks(rank, rank)


METHODS: dict[str, Method] = {"bottleneck": Bottleneck()}
