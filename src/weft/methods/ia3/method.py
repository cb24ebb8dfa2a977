"""IA³ (Liu et al. 2022): a frozen linear whose outputs, or in feed-forward modules whose inputs, are scaled one by one.

Per adapted module W (out, in) one vector l: (out, 1), or (1, in) in a feed-forward module. It starts at 1, where it
changes nothing. On the outputs of a module:
    y = l ⊙ p with p = x Wᵀ + b;    dl += Σ dy ⊙ p,    dp = l ⊙ dy
On the inputs of a feed-forward module:
    y = z Wᵀ + b with z = l ⊙ x;    dl += Σ dz ⊙ x,    dx = l ⊙ dz, where dz = dy W
The sums run over the rows of one sample at a time, in fp32 and in the job's order. l is near 1, where bfloat16 has
steps of 1/128: products with it are taken in fp32 and rounded once, as PEFT does. No row of another slot is read.

Kernels read the vectors themselves; there are none for scaled inputs that several modules share. Files have the keys of
PEFT 0.21's IA3Config, and ia3_l of every module.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, D in, O out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
    peft_keys,
)
from weft.adapters.routing import Routing, SlotRows
from weft.errors import AdapterFileError
from weft.kernels.methods.parts import ColumnChange, OtherParts
from weft.spec import AdapterSpec


@dataclass
class OutputScale(SlotWeights):
    """One number per output of a module: views into the adapter's flat buffer."""

    changes_gradient: ClassVar[bool] = True

    l_O1: torch.Tensor
    grad_l_O1: torch.Tensor

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> torch.Tensor:
        product_LO = y_TO[rows.own].clone()
        _scale(y_TO, self.l_O1, rows)
        return product_LO

    def change_gradient(self, dy_TO: torch.Tensor, rows: SlotRows) -> None:
        _scale(dy_TO, self.l_O1, rows)

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: torch.Tensor
    ) -> None:
        for sample in rows.samples:
            _accumulate(self.grad_l_O1, dy_TO[sample.buffer], kept[sample.slot])


@dataclass
class InputScale(SlotWeights):
    """One number per input of a feed-forward module: views into the adapter's flat buffer."""

    changes_input: ClassVar[bool] = True

    l_1D: torch.Tensor
    grad_l_1D: torch.Tensor

    def change_input(self, x_TD: torch.Tensor, rows: SlotRows) -> None:
        _scale(x_TD, self.l_1D, rows)

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> None:
        """Nothing: the change is made before the product."""

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: None
    ) -> None:
        assert dx_TD is not None
        for sample in rows.samples:
            _accumulate(self.grad_l_1D, dx_TD[sample.buffer], x_TD[sample.buffer])
        _scale(dx_TD, self.l_1D, rows)


def _scale(x_TN: torch.Tensor, l: torch.Tensor, rows: SlotRows) -> None:  # noqa: E741
    own_LN = x_TN[rows.own]
    own_LN.copy_(own_LN.float() * l.flatten())


def _accumulate(grad: torch.Tensor, left_LN: torch.Tensor, right_LN: torch.Tensor) -> None:
    grad.view(-1).add_((left_LN.float() * right_LN.float()).sum(dim=0))


class Ia3Files(PeftFormat):
    peft_type = "IA3"
    in_peft = True
    title = "IA³"
    suffixes: Mapping[str, str] = {"ia3_l": "ia3_l"}
    defaults: Mapping[str, Any] = peft_keys(
        peft_type,
        "exclude_modules",
        "feedforward_modules",
        "target_modules",
        fan_in_fan_out=False,
        init_ia3_weights=True,
    )

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """The modules whose inputs are scaled: names of `target_names`, since PEFT requires a subset of those."""
        inputs = {path for path in paths if spec.is_feedforward(path)}
        names = [name for name in target_names if any(_ends(path, name) for path in inputs)]
        if any(_ends(path, name) for path in set(paths) - inputs for name in names):
            # Modules of one name have scaled inputs and scaled outputs: only whole paths are unambiguous.
            names, target_names = sorted(inputs), sorted(paths)
        return {
            "feedforward_modules": names,
            "init_ia3_weights": spec.init_ia3_weights,
            "target_modules": list(target_names),
        }

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        if config.get("feedforward_modules") is None:
            raise AdapterFileError("feedforward_modules is missing; name them, or write an empty list.", where=where)

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        given = config["feedforward_modules"]
        return {
            "feedforward_modules": sorted(given) if isinstance(given, list) else given,
            "init_ia3_weights": config.get("init_ia3_weights", True),
        }

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """One row for the inputs of a feed-forward module, one column for the outputs of others."""
        shape = tuple(tensors[0].shape)
        side, expected = (0, "(1, in)") if spec.is_feedforward(path) else (1, "(out, 1)")
        if len(shape) != 2 or shape[side] != 1 or not tensors[0].numel():
            raise AdapterFileError(f"{path} has ia3_l {shape}; expected {expected}.", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        rows, columns = tensors[0].shape
        return (rows, None) if columns == 1 else (None, columns)

    def what_it_is(self, name: str) -> str:
        return "which is no ia3_l vector"

    def summary(self, spec: AdapterSpec) -> str:
        return "keys, values and feed-forward activations are scaled by learned vectors"


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


class Ia3(Method):
    groups: tuple[str, ...] = ("l",)
    files: PeftFormat = Ia3Files()
    kernel_keeps: Keeps = "outputs"
    kernel_changes: tuple[Change, ...] = (("outputs", "qkv"), ("inputs", "down"))

    def has_kernels(self, spec: AdapterSpec) -> bool:
        """True if only outputs and the inputs of down projections are scaled."""
        named = spec.feedforward_modules
        return named is None or (not isinstance(named, str) and set(named) <= {"down_proj"})

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        return ((1, linear[1]) if spec.is_feedforward(path) else (linear[0], 1),)

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        (shape,) = self.shapes(spec, path, site.shape)
        return (torch.ones(shape) if spec.init_ia3_weights else torch.randn(shape, generator=generator),)

    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        return InputScale(*params, *grads) if spec.is_feedforward(path) else OutputScale(*params, *grads)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        copy = KernelCopy(adapter)
        outputs = {p: w for p, w in adapter.modules.items() if isinstance(w, OutputScale)}
        inputs = {p: w for p, w in adapter.modules.items() if isinstance(w, InputScale)}
        copy.others = OtherParts(
            {p: ColumnChange(w.l_O1.view(-1), grad_factor_N=w.grad_l_O1.view(-1)) for p, w in outputs.items()},
            {p: ColumnChange(w.l_1D.view(-1), grad_factor_N=w.grad_l_1D.view(-1)) for p, w in inputs.items()},
        )
        return copy

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        (scale,) = tensors
        scale, weight_OD, bias_O = scale.float().to(linear.weight.device), linear.weight, linear.bias
        weight_OD.copy_((weight_OD.float() * scale).to(weight_OD.dtype))
        if bias_O is not None and not spec.is_feedforward(path):
            bias_O.copy_((bias_O.float() * scale.flatten()).to(bias_O.dtype))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        return 0 if spec.is_feedforward(path) else linear[0]


METHODS: dict[str, Method] = {"ia3": Ia3()}
