"""DoRA (Liu et al. 2024): LoRA that learns the direction of each row of the updated weight, and m its length.

It computes x Vᵀ + bias with V = m / ‖W + scale · B A‖ ⊙ (W + scale · B A), row by row; m starts as the lengths of W's
rows, where DoRA does what LoRA does. Its files are those of a LoRA with `use_dora`, and lora_magnitude_vector (out) of
every module.

Kernels see a LoRA whose outputs u + bias are multiplied by g = m / n and shifted by (1 - g) ⊙ bias. n, the lengths of
the rows of W + s B A, are computed once a step from A and B as the kernels see them. Kernels leave G = Σ dy ⊙ (u +
bias) and, where there is a bias, H = Σ dy; once a step they become dm += (G - bias ⊙ H) / n. Where devices share the
inputs of modules, each computes the lengths of its part of the rows; the squares add up. There are no kernels for
dropout, with which rows go through W twice.

Shape suffixes: N outputs of all modules, O out, R rank, P rank padded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from weft.adapters.adapter import Adapter
from weft.adapters.frozen import Dense
from weft.adapters.method import (
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
    frozen_weight,
)
from weft.adapters.sites import SlotLinear
from weft.errors import AdapterFileError, ConfigError
from weft.kernels.lora.tables import padded
from weft.kernels.methods.parts import ColumnChange, OtherParts
from weft.kernels.methods.row_norms import NormedRows, RowNorms
from weft.methods.dora.weights import DoraWeights, DroppingDoraWeights, squared_norms, updated_norms
from weft.methods.lora.method import Lora, LoraFiles
from weft.methods.lora.weights import ComputeCopy
from weft.spec import AdapterSpec, JobSpec


class DoraCopy(ComputeCopy):
    def __init__(self, adapter: Adapter, dtype: torch.dtype, modules: Mapping[str, DoraWeights]) -> None:
        self._own = modules
        super().__init__(adapter, dtype, {path: w.lora for path, w in modules.items()})
        num_outputs = sum(len(w.m_O) for w in modules.values())
        m_N = torch.zeros(num_outputs, device=adapter.device)
        self._norms_N, self._factors_N, self._grad_N = (torch.zeros_like(m_N) for _ in range(3))
        self._bias_N = self._shifts_N = self._sums_N = None
        if any(w.site.bias_O is not None for w in modules.values()):
            self._bias_N, self._shifts_N, self._sums_N = (torch.zeros_like(m_N) for _ in range(3))
            for bias_O, w in zip(self._split(self._bias_N), modules.values(), strict=True):
                if w.site.bias_O is not None:
                    bias_O.copy_(w.site.bias_O)
        buffers = (self._factors_N, self._shifts_N, self._grad_N, self._sums_N)
        views = [self._split(buffer) if buffer is not None else [None] * len(modules) for buffer in buffers]
        # A weight that is stored otherwise is made dense for a moment, each in turn.
        is_dense = all(isinstance(w.site, SlotLinear) and isinstance(w.site.frozen, Dense) for w in modules.values())
        self._row_norms = RowNorms([self._normed(path) for path in modules]) if is_dense else None
        self.others = OtherParts(
            {path: ColumnChange(*own) for path, own in zip(modules, zip(*views, strict=True), strict=True)}
        )

    def copy_weights(self) -> None:
        """Copies A and scale · B, then computes row norms and the factors."""
        super().copy_weights()
        if self._row_norms is not None:
            self._row_norms.measure()
        else:
            for path in self._own:
                RowNorms([self._normed(path)]).measure()
        self._make_whole()
        torch.div(torch.cat([w.m_O for w in self._own.values()]), self._norms_N, out=self._factors_N)
        if self._bias_N is not None and self._shifts_N is not None:
            torch.mul(self._bias_N, 1 - self._factors_N, out=self._shifts_N)

    def collect(self) -> None:
        if self._bias_N is not None and self._sums_N is not None:
            self._grad_N.addcmul_(self._bias_N, self._sums_N, value=-1)
        grads, lengths = self._split(self._grad_N), self._split(self._norms_N)
        torch._foreach_addcdiv_([w.grad_m_O for w in self._own.values()], grads, lengths)
        super().collect()
        self._forget_sums()

    def clear_gradients(self) -> None:
        super().clear_gradients()
        self._forget_sums()

    def _forget_sums(self) -> None:
        self._grad_N.zero_()
        if self._sums_N is not None:
            self._sums_N.zero_()

    def _make_whole(self) -> None:
        pairs = zip(self._split(self._norms_N), self._own.values(), strict=True)
        parts = [(norms_O, w.site.share) for norms_O, w in pairs if not w.site.share.has_all_inputs]
        if parts:
            squares = parts[0][1].over_inputs(torch.cat([norms_O for norms_O, _ in parts]).square_())
            lengths = squares.sqrt_().split([len(norms_O) for norms_O, _ in parts])
            torch._foreach_copy_([norms_O for norms_O, _ in parts], lengths)

    def _normed(self, path: str) -> NormedRows:
        weight_OD, entry = frozen_weight(self._own[path].site), self.entries[path]
        norms_O = self._split(self._norms_N)[list(self._own).index(path)]
        return NormedRows(weight_OD.detach(), entry.a_PD, entry.b_OP, norms_O)

    def _split(self, flat_N: torch.Tensor) -> list[torch.Tensor]:
        return list(flat_N.split([len(w.m_O) for w in self._own.values()]))


MAGNITUDE = "lora_magnitude_vector"


class DoraFiles(LoraFiles):
    marker: str | None = "use_dora"
    title = "DoRA"
    suffixes: Mapping[str, str] = {**LoraFiles.suffixes, MAGNITUDE: MAGNITUDE}

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        return {**super().config(spec, target_names, paths), "use_dora": True}

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        a_RD, b_OR, m_O = tensors
        super().check_tensors(spec, path, (a_RD, b_OR), where)
        if m_O.shape != b_OR.shape[:1]:
            raise AdapterFileError(
                f"{path} has {MAGNITUDE} {tuple(m_O.shape)}; expected ({b_OR.shape[0]},), one length for each output.",
                where=where,
            )

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, ...]:
        return super().linear_shape(tensors[:2])

    def what_it_is(self, name: str) -> str:
        return super().what_it_is(name).replace("neither a lora_A nor a lora_B weight", "no tensor of a DoRA")


class Dora(Lora):
    groups: tuple[str, ...] = (*Lora.groups, "m")
    has_any_order_kernels = False
    files: PeftFormat = DoraFiles()
    kernel_keeps: Keeps = "outputs"
    kernel_changes: tuple[Change, ...] = tuple(("outputs", role) for role in ("qkv", "out", "gate_up", "down"))

    def has_kernels(self, spec: AdapterSpec) -> bool:
        return not spec.lora_dropout

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        return *super().shapes(spec, path, linear), (linear[0],)

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        a_RD, b_OR = super().initial(spec, path, site, generator)
        norms_O = _norms(spec, path, site.share.joined(frozen_weight(site)), a_RD, b_OR)
        if not (norms_O.isfinite() & (norms_O > 0)).all():
            raise ConfigError(
                f"DoRA divides by the lengths of the rows of {path}, and one of them is zero or not finite; "
                "leave the module out with exclude_modules, or use lora.",
                where="adapter.method",
            )
        return a_RD, b_OR, norms_O

    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        lora = self.lora_weights(spec, path, site, params[:2], grads[:2])
        kind = DroppingDoraWeights if spec.lora_dropout else DoraWeights
        return kind(lora, params[2], grads[2], site)

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        """LoRA's factors; with LoRA+, PEFT uses B's rate for the magnitudes."""
        rates = super().rate_factors(job)
        return *rates, rates[-1]

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        return DoraCopy(adapter, dtype, cast(dict[str, DoraWeights], adapter.modules))

    def compile_copy(self, rank: int, linears: Sequence[LinearShape], like: torch.Tensor) -> None:
        width = padded(rank)
        RowNorms(
            [
                NormedRows(
                    like.new_empty(num_out, num_in),
                    like.new_empty(width, num_in),
                    like.new_empty(num_out, width),
                    like.new_empty(num_out, dtype=torch.float32),
                )
                for num_out, num_in in linears
            ]
        ).measure()

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        weight_OD = linear.weight
        a_RD, b_OR, m_O = (tensor.float().to(weight_OD.device) for tensor in tensors)
        factor_O1 = (m_O / _norms(spec, path, weight_OD, a_RD, b_OR))[:, None]
        updated_OD = weight_OD.float() + spec.scale_for(path) * (b_OR @ a_RD)
        weight_OD.copy_((factor_O1 * updated_OD).to(weight_OD.dtype))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        return super().saved_width(spec, path, linear) + linear[0]

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        ranks = super().cost_ranks(spec)
        return CostRanks(ranks.usual + 1, ranks.widest + 1)


METHODS: dict[str, Method] = {"dora": Dora()}


def _norms(
    spec: AdapterSpec, path: str, weight_OD: torch.Tensor, a_RD: torch.Tensor, b_OR: torch.Tensor
) -> torch.Tensor:
    a_RD, b_OR = a_RD.to(weight_OD.device), b_OR.to(weight_OD.device)
    return updated_norms(weight_OD, squared_norms(weight_OD), a_RD, b_OR, spec.scale_for(path))
