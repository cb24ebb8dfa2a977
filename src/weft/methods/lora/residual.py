"""LoRA that starts as a part of the frozen weight: PiSSA and OLoRA.

PEFT takes that part, s B₀ A₀, out of the base and lets the adapter hold it. The backbone is shared here, so it stays as
it is, and the adapter keeps B₀ and A₀ beside B and A, frozen, and computes
    y = x Wᵀ + b + s x (B A − B₀ A₀)ᵀ
which is a LoRA of twice the rank, [A; A₀] and [B, −B₀], of which one half is trained. Its file is that LoRA: correct on
the unchanged base.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, D in, O out, R rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import CostRanks, KernelCopy, LinearShape, ModuleTensors, Site, SlotWeights, frozen_weight
from weft.adapters.routing import SlotRows
from weft.errors import ConfigError
from weft.methods.lora.method import Lora
from weft.methods.lora.principal import starting_part
from weft.methods.lora.weights import ComputeCopy, LoraWeights
from weft.spec import AdapterSpec


@dataclass
class ResidualLoraWeights(LoraWeights):
    start_a_RD: torch.Tensor
    start_b_OR: torch.Tensor

    def compute_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        a_RD, b_OR = torch.cat([self.a_RD, self.start_a_RD]), torch.cat([self.b_OR, -self.start_b_OR], dim=1)
        return a_RD.to(dtype), b_OR.to(dtype)

    def accumulate(
        self, rows: SlotRows, x_LD: torch.Tensor, s_LR: torch.Tensor, ds_LR: torch.Tensor, dy_TO: torch.Tensor
    ) -> None:
        rank = self.a_RD.shape[0]
        super().accumulate(rows, x_LD, s_LR[:, :rank], ds_LR[:, :rank], dy_TO)


class ResidualCopy(ComputeCopy):
    """[A; A₀] and scale · [B, −B₀] of one adapter, with gradients of both halves."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, halves: Mapping[str, ResidualLoraWeights]) -> None:
        self._halves = halves
        sizes_a = [2 * w.grad_a_RD.numel() for w in halves.values()]
        sizes_b = [2 * w.grad_b_OR.numel() for w in halves.values()]
        self._grads = tuple(torch.zeros(sum(sizes), device=adapter.device) for sizes in (sizes_a, sizes_b))
        grads_a, grads_b = (flat.split(sizes) for flat, sizes in zip(self._grads, (sizes_a, sizes_b), strict=True))
        whole = {
            path: LoraWeights(
                a_RD=torch.cat([w.a_RD, w.start_a_RD]).to("meta"),
                b_OR=torch.cat([w.b_OR, w.start_b_OR], dim=1).to("meta"),
                grad_a_RD=grad_a.view(-1, w.a_RD.shape[1]) if len(grad_a) else grad_a,
                grad_b_OR=grad_b.view(len(w.b_OR), -1),
                scale=w.scale,
                dropout=w.dropout,
                key=w.key,
                first_input=w.first_input,
            )
            for (path, w), grad_a, grad_b in zip(halves.items(), grads_a, grads_b, strict=True)
        }
        super().__init__(adapter, dtype, whole)

    def copy_weights(self) -> None:
        for path, w in self._halves.items():
            entry, rank = self.entries[path], w.a_RD.shape[0]
            entry.a_PD[:rank], entry.a_PD[rank : 2 * rank] = w.a_RD, w.start_a_RD
            entry.b_OP[:, :rank], entry.b_OP[:, rank : 2 * rank] = w.b_OR * w.scale, w.start_b_OR * -w.scale

    def collect(self) -> None:
        for path, w in self._halves.items():
            entry, rank = self.entries[path], w.a_RD.shape[0]
            if w.grad_a_RD.numel():
                w.grad_a_RD.add_(entry.grad_a_RD[:rank])
                entry.grad_a_RD.zero_()
            w.grad_b_OR.add_(entry.grad_b_OR[:, :rank])
            entry.grad_b_OR.zero_()

    def clear_gradients(self) -> None:
        for flat in self._grads:
            flat.zero_()


class ResidualLora(Lora):
    groups: tuple[str, ...] = (*Lora.groups, "start_a", "start_b")
    has_any_order_kernels = False

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
        """ConfigError if a module does not allow twice the rank, which the adapter's file has."""
        for path, shape in modules.items():
            rank = spec.rank_for(path)
            if 2 * rank > min(shape):
                raise ConfigError(
                    f"with {spec.init_lora_weights} an adapter of rank {rank} is written as one of {2 * rank}, which "
                    f"is above the smaller side of {path} ({shape[0]} x {shape[1]}).",
                    where="adapter.r" if rank == spec.r else "adapter.rank_pattern",
                )

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        own = super().shapes(spec, path, linear)
        return *own, *own

    def frozen(self, spec: AdapterSpec) -> tuple[str, ...]:
        return *super().frozen(spec), "start_a", "start_b"

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        assert isinstance(spec.init_lora_weights, str)
        part = starting_part(
            site.share.joined(frozen_weight(site)).float(),
            spec.init_lora_weights,
            spec.rank_for(path),
            spec.scale_for(path),
            generator,
        )
        return *part, *part

    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        plain = self.lora_weights(spec, path, site, params[:2], grads[:2])
        own = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return ResidualLoraWeights(**own, start_a_RD=params[2], start_b_OR=params[3])

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        return ResidualCopy(adapter, dtype, cast(dict[str, ResidualLoraWeights], adapter.modules))

    def kernel_bytes(self, spec: AdapterSpec, modules: Mapping[str, LinearShape], each: int) -> int:
        """The initial values in two types, and the gradients of both halves."""
        return sum(spec.rank_for(path) * sum(shape) for path, shape in modules.items()) * (4 + each + 2 * 4)

    def kernel_rank(self, spec: AdapterSpec) -> int:
        return 2 * super().kernel_rank(spec)

    def exported(
        self, spec: AdapterSpec, tensors: Mapping[str, ModuleTensors]
    ) -> tuple[AdapterSpec, Mapping[str, ModuleTensors]]:
        factor = math.sqrt(2) if spec.use_rslora else 2
        plain = dataclasses.replace(
            spec,
            r=2 * spec.r,
            lora_alpha=factor * spec.default_alpha,
            rank_pattern={name: 2 * rank for name, rank in spec.rank_pattern.items()},
            alpha_pattern={name: factor * alpha for name, alpha in spec.alpha_pattern.items()},
            init_lora_weights=True,
        )
        doubled = {
            path: (torch.cat([a_RD, start_a_RD]), torch.cat([b_OR, -start_b_OR], dim=1))
            for path, (a_RD, b_OR, start_a_RD, start_b_OR) in tensors.items()
        }
        return plain, doubled

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        return 2 * spec.rank_for(path)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        ranks = super().cost_ranks(spec)
        return CostRanks(2 * ranks.usual, 2 * ranks.widest)
