"""A small method on the outputs of blocks, to show that there is room for such: y + tanh(y Dᵀ + c) Uᵀ.

Per block an inner layer of WIDTH: D (WIDTH, D) and c make it, U (D, WIDTH) adds it to the block's output. U starts at
zero, where it changes nothing. Shape suffixes: T rows of the microbatch, L rows of a slot or a sample, D width of the
residual stream, W of the inner layer.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from weft.adapters.method import Attachment, CostRanks, KernelCopy, LinearShape, ModuleTensors, Place, SlotWeights
from weft.adapters.methods import METHODS
from weft.adapters.routing import Routing, SlotRows
from weft.errors import AdapterFileError
from weft.spec import AdapterSpec, JobSpec, adapter

NAME = "bottleneck"
WIDTH = 5


@dataclasses.dataclass
class BottleneckWeights(SlotWeights):
    """One block's tensors, and their gradients."""

    params: ModuleTensors
    grads: ModuleTensors

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> list[torch.Tensor]:
        down_WD, bias_W, up_DW = (param.to(x_TD.dtype) for param in self.params)
        kept = []
        for window in rows.windows:
            inner_LW = (x_TD[window.computed].mm(down_WD.t()) + bias_W).tanh()
            y_TO[window.own].add_(inner_LW.mm(up_DW.t())[window.inside])
            kept.append(inner_LW[window.inside])
        return kept

    def backward(
        self,
        x_TD: torch.Tensor,
        dy_TO: torch.Tensor,
        dx_TD: torch.Tensor | None,
        rows: SlotRows,
        kept: list[torch.Tensor],
    ) -> None:
        down_WD, _, up_DW = (param.to(x_TD.dtype) for param in self.params)
        gradients = []
        for window, inner_LW in zip(rows.windows, kept, strict=True):
            size = window.computed.stop - window.computed.start
            d_inner_LW = dy_TO.new_zeros(size, WIDTH)
            d_inner_LW[window.inside] = dy_TO[window.computed].mm(up_DW)[window.inside] * (1 - inner_LW * inner_LW)
            gradients.append(d_inner_LW[window.inside])
            if dx_TD is not None:
                dx_TD[window.own].add_(d_inner_LW.mm(down_WD)[window.inside])
        inner_LW, d_inner_LW = torch.cat(kept).float(), torch.cat(gradients).float()
        grad_down_WD, grad_bias_W, grad_up_DW = self.grads
        for sample in rows.samples:
            grad_down_WD.addmm_(d_inner_LW[sample.slot].t(), x_TD[sample.buffer].float())
            grad_bias_W.add_(d_inner_LW[sample.slot].sum(dim=0))
            grad_up_DW.addmm_(dy_TO[sample.buffer].t().float(), inner_LW[sample.slot])


class BottleneckFiles:
    """Files in PEFT's form, which PEFT itself cannot read."""

    peft_type = "BOTTLENECK"
    in_peft = False
    title = "bottleneck"
    suffixes: Mapping[str, str] = {"down": "down.weight", "bias": "down.bias", "up": "up.weight"}
    defaults: Mapping[str, Any] = {
        "base_model_name_or_path": None,
        "exclude_modules": None,
        "peft_type": "BOTTLENECK",
        "target_modules": None,
        "task_type": "CAUSAL_LM",
    }
    refused: Mapping[str, str] = {}

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        return {}

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        pass

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        if tensors[0].shape[0] != WIDTH:
            raise AdapterFileError(f"{path} has another width than {WIDTH}.", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        return tensors[2].shape[0], tensors[0].shape[1]

    def what_it_is(self, name: str) -> str:
        return "which is no tensor of a bottleneck"

    def summary(self, spec: AdapterSpec) -> str:
        return f"an inner layer of {WIDTH} on the outputs of blocks"


class Bottleneck:
    """The method `bottleneck`."""

    attachment = Attachment.BLOCK_OUTPUT
    groups: tuple[str, ...] = ("down", "bias", "up")
    has_kernels = False
    files = BottleneckFiles()

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
        assert all(num_out == num_in for num_out, num_in in modules.values())

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        return (WIDTH, linear[1]), (WIDTH,), (linear[0], WIDTH)

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        down, bias, up = self.shapes(spec, path, (place.out_features, place.in_features))
        return torch.randn(down, generator=generator) / 8, torch.zeros(bias), torch.zeros(up)

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        return BottleneckWeights(params, grads)

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        return 1.0, 1.0, 1.0

    def kernel_copy(self, adapter: Any, dtype: torch.dtype) -> KernelCopy:
        raise AssertionError("it has no kernels")

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        raise AssertionError("it does not sit on linears")

    def kept_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        return WIDTH

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        return CostRanks(WIDTH, WIDTH)


BOTTLENECK = Bottleneck()


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `method: bottleneck` a choice for one test."""
    monkeypatch.setitem(METHODS, NAME, BOTTLENECK)
    monkeypatch.setitem(adapter.AUTO_TARGETS, NAME, "all-blocks")
    field = next(field for field in dataclasses.fields(AdapterSpec) if field.name == "method")
    known = types.MappingProxyType({**field.metadata, "choices": (*field.metadata["choices"], NAME)})
    monkeypatch.setattr(field, "metadata", known)
