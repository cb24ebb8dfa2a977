"""LoRA: per adapted module W (out, in) an A (r, in) and a B (out, r); it computes x Wᵀ + scale · drop(x) Aᵀ Bᵀ.

All A of an adapter are one group and all B another, so LoRA+ needs no more than two learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

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
from weft.errors import ConfigError
from weft.kernels.dropout import module_key
from weft.methods.lora.compute_copy import ComputeCopy
from weft.methods.lora.files import LoraFiles
from weft.methods.lora.weight_parts import starting_part
from weft.methods.lora.weights import LoraWeights
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class Lora(Method):
    """The method `lora`."""

    attachment = Attachment.LINEAR
    groups: tuple[str, ...] = ("a", "b")
    has_any_order_kernels = True
    files: PeftFormat = LoraFiles()

    def has_kernels(self, spec: AdapterSpec) -> bool:
        return True

    def kernel_rank(self, spec: AdapterSpec) -> int:
        """Its own."""
        return max([spec.r, *spec.rank_pattern.values()])

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
        """ConfigError if a rank is above what a module can have; a gate, which has one output, takes any."""
        for path, shape in modules.items():
            rank = spec.rank_for(path)
            if rank > min(shape) and shape[0] > 1:
                raise ConfigError(
                    f"rank {rank} is above the smaller side of {path} ({shape[0]} x {shape[1]}).",
                    where="adapter.r" if rank == spec.r else "adapter.rank_pattern",
                )

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """Of A and B on one module."""
        rank = spec.rank_for(path)
        return (rank, linear[1]), (linear[0], rank)

    def frozen(self, spec: AdapterSpec) -> tuple[str, ...]:
        """A, where `freeze_a` says so."""
        return ("a",) if spec.freeze_a else ()

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """PEFT's starting values of A and B, by `init_lora_weights`."""
        shape_a, shape_b = self.shapes(spec, path, (place.out_features, place.in_features))[:2]
        rank, num_in = shape_a

        def uniform(shape: tuple[int, ...]) -> torch.Tensor:
            # Kaiming-uniform with a = sqrt(5), the start of every torch Linear: uniform in ±1/sqrt(fan_in).
            return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])

        if spec.init_lora_weights == "loftq" and place.read_original is not None:
            weight_OD = place.weight
            assert weight_OD is not None, "it sits on linears"
            lost_OD = place.read_original().float() - place.share.joined(weight_OD).float()
            return starting_part(lost_OD, "loftq", rank, spec.scale_for(path), generator)
        if spec.init_lora_weights == "gaussian":
            return torch.randn(shape_a, generator=generator) / rank, torch.zeros(shape_b)
        if spec.init_lora_weights == "orthogonal":
            # A lives on one half of an orthogonal basis of rank space and B on the other, so B·A starts at zero.
            basis = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]
            a = basis[0::2].t() @ torch.randn(rank // 2, num_in, generator=generator) / 10
            b = torch.randn(shape_b[0], rank // 2, generator=generator) @ basis[1::2] / 10
            return a, b
        if spec.init_lora_weights is False:
            return uniform(shape_a), uniform(shape_b)
        return uniform(shape_a), torch.zeros(shape_b)

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """A and B of one module with their gradients."""
        return self.lora_weights(spec, path, place, params, grads)

    def lora_weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> LoraWeights:
        """The same, for methods with more than A and B."""
        (a_RD, b_OR), (grad_a_RD, grad_b_OR) = params, grads
        return LoraWeights(
            a_RD=a_RD,
            b_OR=b_OR,
            grad_a_RD=grad_a_RD,
            grad_b_OR=grad_b_OR,
            scale=spec.scale_for(path),
            dropout=spec.lora_dropout,
            key=module_key(path),
            first_input=place.share.inputs.start,
        )

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        """B's learning rate is higher with LoRA+."""
        rate_b = job.loraplus_lr_ratio or 1.0
        return (rate_b,) if job.adapter.freeze_a else (1.0, rate_b)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """A and scale · B in the type of the activations."""
        return ComputeCopy(adapter, dtype, cast(dict[str, LoraWeights], adapter.modules))

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """W + scale · B A."""
        (a_RD, b_OR), weight_OD = tensors, linear.weight
        update_OD = spec.scale_for(path) * (b_OR.float() @ a_RD.float())
        weight_OD.copy_((weight_OD.float() + update_OD.to(weight_OD.device)).to(weight_OD.dtype))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """S."""
        return spec.rank_for(path)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Its own ranks."""
        return CostRanks(spec.r, max([spec.r, *spec.rank_pattern.values()]))


METHODS: dict[str, Method] = {"lora": Lora()}
