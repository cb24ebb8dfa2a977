"""DoRA (Liu et al. 2024): LoRA that learns the direction of each row of the updated weight, and m its length.

It computes x Vᵀ + bias with V = m / ‖W + scale · B A‖ ⊙ (W + scale · B A), row by row; m starts as the lengths that the
rows have, where DoRA does what LoRA does. There are no kernels for dropout, with which rows go through W twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from weft.adapters.method import (
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
from weft.methods.dora.files import DoraFiles
from weft.methods.dora.kernel_copy import DoraCopy, compile_norms
from weft.methods.dora.row_norms import squared_norms, updated_norms
from weft.methods.dora.weights import DoraWeights, DroppingDoraWeights
from weft.methods.lora.method import Lora
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class Dora(Lora):
    """The method `dora`."""

    groups: tuple[str, ...] = (*Lora.groups, "m")
    has_any_order_kernels = False
    files: PeftFormat = DoraFiles()
    kernel_keeps: Keeps = "outputs"
    kernel_changes: tuple[Change, ...] = tuple(("outputs", role) for role in ("qkv", "out", "gate_up", "down"))

    def has_kernels(self, spec: AdapterSpec) -> bool:
        """Where nothing is dropped."""
        return not spec.lora_dropout

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """Of A, B and m on one module."""
        return *super().shapes(spec, path, linear), (linear[0],)

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """LoRA's A and B, and the lengths that the rows of the updated weight have with them."""
        a_RD, b_OR = super().initial(spec, path, place, generator)
        weight_OD = place.weight
        assert weight_OD is not None, "it sits on linears"
        norms_O = _norms(spec, path, place.share.joined(weight_OD), a_RD, b_OR)
        if not (norms_O.isfinite() & (norms_O > 0)).all():
            raise ConfigError(
                f"DoRA divides by the lengths of the rows of {path}, and one of them is zero or not finite; "
                "leave the module out with exclude_modules, or use lora.",
                where="adapter.method",
            )
        return a_RD, b_OR, norms_O

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """A, B and m of one module with their gradients."""
        lora = self.lora_weights(spec, path, place, params[:2], grads[:2])
        kind = DroppingDoraWeights if spec.lora_dropout else DoraWeights
        return kind(lora, params[2], grads[2], place)

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        """LoRA's; with LoRA+, PEFT lets the lengths learn at B's rate."""
        rates = super().rate_factors(job)
        return *rates, rates[-1]

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """A LoRA's, and what its outputs are multiplied with."""
        return DoraCopy(adapter, dtype, cast(dict[str, DoraWeights], adapter.modules))

    def compile_copy(self, rank: int, linears: Sequence[LinearShape], like: torch.Tensor) -> None:
        """Measures lengths."""
        compile_norms(rank, linears, like)

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """W + scale · B A, with its rows made as long as m says."""
        weight_OD = linear.weight
        a_RD, b_OR, m_O = (tensor.float().to(weight_OD.device) for tensor in tensors)
        factor_O1 = (m_O / _norms(spec, path, weight_OD, a_RD, b_OR))[:, None]
        updated_OD = weight_OD.float() + spec.scale_for(path) * (b_OR @ a_RD)
        weight_OD.copy_((factor_O1 * updated_OD).to(weight_OD.dtype))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """S, and the outputs before they were scaled."""
        return super().saved_width(spec, path, linear) + linear[0]

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """LoRA's, and one more for m."""
        ranks = super().cost_ranks(spec)
        return CostRanks(ranks.usual + 1, ranks.widest + 1)


METHODS: dict[str, Method] = {"dora": Dora()}


def _norms(
    spec: AdapterSpec, path: str, weight_OD: torch.Tensor, a_RD: torch.Tensor, b_OR: torch.Tensor
) -> torch.Tensor:
    a_RD, b_OR = a_RD.to(weight_OD.device), b_OR.to(weight_OD.device)
    return updated_norms(weight_OD, squared_norms(weight_OD), a_RD, b_OR, spec.scale_for(path))
