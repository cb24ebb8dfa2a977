"""VeRA (Kopiczko et al. 2023): per module two vectors d (r) and b (out) around random matrices that all modules share.

It computes x Wᵀ + b ⊙ (d ⊙ drop(x) Aᵀ) Bᵀ with the corners A (r, in) and B (out, r) of the shared matrices. These
follow from `projection_prng_key` and are never trained or checkpointed.
"""

from __future__ import annotations

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
from weft.kernels.dropout import module_key
from weft.methods.vera.files import VeraFiles
from weft.methods.vera.kernel_copy import VeraCopy, compile_scales
from weft.methods.vera.projection import projection_for
from weft.methods.vera.weights import VeraWeights
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class Vera(Method):
    """The method `vera`."""

    attachment = Attachment.LINEAR
    groups: tuple[str, ...] = ("d", "b")
    files: PeftFormat = VeraFiles()

    def has_kernels(self, spec: AdapterSpec) -> bool:
        return True

    def kernel_bytes(self, spec: AdapterSpec, modules: Mapping[str, LinearShape], each: int) -> int:
        """B with both vectors in it, and its gradient."""
        return sum(num_out for num_out, _ in modules.values()) * spec.vera_rank * (each + 4)

    def kernel_rank(self, spec: AdapterSpec) -> int:
        """Its own."""
        return spec.vera_rank

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """Of d and b on one module."""
        return (spec.vera_rank,), (linear[0],)

    def shared(
        self, spec: AdapterSpec, modules: Mapping[str, LinearShape], device: torch.device
    ) -> Mapping[str, torch.Tensor]:
        """The random matrices."""
        return projection_for(spec.projection_prng_key, spec.vera_rank, modules.values(), device)

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """One number for all of d, and zeros for b, where it changes nothing."""
        return torch.full((spec.vera_rank,), spec.d_initial), torch.zeros(place.out_features)

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """The vectors of one module with their gradients, and the corners of the shared matrices."""
        d_R, b_O, a_RD, b_OR = params
        nothing = a_RD.new_empty(0)
        return VeraWeights(
            a_RD=a_RD[:, place.share.inputs],
            b_OR=b_OR[place.share.outputs],
            grad_a_RD=nothing,
            grad_b_OR=nothing,
            scale=1.0,
            dropout=spec.lora_dropout,
            key=module_key(path),
            first_input=place.share.inputs.start,
            d_R=d_R,
            b_O=b_O,
            grad_d_R=grads[0],
            grad_b_O=grads[1],
        )

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """A LoRA whose A is frozen."""
        return VeraCopy(adapter, dtype, cast(dict[str, VeraWeights], adapter.modules))

    def compile_copy(self, rank: int, linears: Sequence[LinearShape], like: torch.Tensor) -> None:
        """Makes B and takes its gradient apart."""
        compile_scales(rank, linears, like)

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """W + (b ⊙ B) (d ⊙ A)."""
        weight_OD = linear.weight
        d_R, b_O, a_RD, b_OR = (tensor.float().to(weight_OD.device) for tensor in tensors)
        num_out, num_in = weight_OD.shape
        update_OD = (b_O[:, None] * b_OR[:num_out]) @ (d_R[:, None] * a_RD[:, :num_in])
        weight_OD.copy_((weight_OD.float() + update_OD).to(weight_OD.dtype))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """S."""
        return spec.vera_rank

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Its products are those of a LoRA of its rank; what it holds, the shared matrices included, is far less."""
        return CostRanks(spec.vera_rank, 2 + spec.vera_rank // 64)


METHODS: dict[str, Method] = {"vera": Vera()}
