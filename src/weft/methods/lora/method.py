"""LoRA: per adapted module W (out, in) an A (r, in) and a B (out, r); it computes x Wᵀ + scale · drop(x) Aᵀ Bᵀ.

All A of an adapter are one group and all B another, so LoRA+ needs no more than two learning rates. Files have the keys
of PEFT 0.21's LoraConfig, and lora_A (r, in) and lora_B (out, r) of every module. A setting that changes what the
weights mean and that we do not implement is refused by name, so an adapter is never quietly read as something it is
not."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.adapters.adapter import Adapter
from weft.adapters.experts import ExpertSite
from weft.adapters.method import (
    CostRanks,
    KernelCopy,
    LinearShape,
    Method,
    ModuleTensors,
    PeftFormat,
    Site,
    SlotWeights,
    frozen_weight,
    peft_keys,
    refuse_bias,
)
from weft.errors import AdapterFileError, ConfigError
from weft.kernels.dropout import module_key
from weft.methods.lora.config import WORKED_OUT_STARTS, TokenIds
from weft.methods.lora.expert_weights import ExpertLoraWeights
from weft.methods.lora.principal import starting_part
from weft.methods.lora.weights import ComputeCopy, LoraWeights
from weft.settings import DOWN, describe, is_expert_path
from weft.spec import AdapterSpec, JobSpec

_REFUSED = {
    "lora_bias": "LoRA with a bias is not supported yet",
    "layer_replication": "it changes the layers of the shared backbone",
    "kasa_config": "KaSA changes the weights of the shared backbone",
    "alora_invocation_tokens": "activated LoRA is not supported yet",
    "arrow_config": "Arrow routing is not supported yet",
    "megatron_config": "Megatron layers are not supported",
    "monteclora_config": "MonteCLoRA is not supported yet",
    "use_bdlora": "block-diagonal LoRA is not supported yet",
    "use_qalora": "QALoRA is not supported yet",
    "velora_config": "VeLoRA is not supported yet",
}
_UNSET = (
    *(key for key in _REFUSED if key not in ("lora_bias", "use_qalora")),
    *("corda_config", "eva_config", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_ga_config"),
    *("target_modules", "target_parameters", "trainable_token_indices"),
)
DEFAULTS = peft_keys(
    "LORA",
    *_UNSET,
    alpha_pattern={},
    bias="none",
    ensure_weight_tying=False,
    fan_in_fan_out=False,
    init_lora_weights=True,
    loftq_config={},
    lora_alpha=8,
    lora_bias=False,
    lora_dropout=0.0,
    megatron_core="megatron.core",
    qalora_group_size=16,
    r=8,
    rank_pattern={},
    use_dora=False,
    use_qalora=False,
    use_rslora=False,
)

_CHANGES_BACKBONE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraFiles(PeftFormat):
    peft_type = "LORA"
    in_peft = True
    title = "LoRA"
    suffixes: Mapping[str, str] = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
    defaults: Mapping[str, Any] = DEFAULTS
    refused: Mapping[str, str] = _REFUSED
    has_experts = True

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        # The two patterns keep their order: the first match wins.
        return {
            "alpha_pattern": {name: _whole(value) for name, value in spec.alpha_pattern.items()},
            "init_lora_weights": True if spec.init_lora_weights in WORKED_OUT_STARTS else spec.init_lora_weights,
            "layers_to_transform": None if spec.layers_to_transform is None else list(spec.layers_to_transform),
            "modules_to_save": None if spec.modules_to_save is None else list(spec.modules_to_save),
            "lora_alpha": _whole(spec.default_alpha),
            "lora_dropout": spec.lora_dropout,
            "r": spec.r,
            "rank_pattern": dict(spec.rank_pattern),
            "trainable_token_indices": _listed(spec.trainable_token_indices),
            "use_rslora": spec.use_rslora,
        }

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        parameters = config.get("target_parameters") or []
        names = parameters if isinstance(parameters, list) else [parameters]
        for name in names:
            if not is_expert_path(f"experts.{str(name).rpartition('.')[2]}"):
                found = f"target_parameters has {describe(name)}"
                raise AdapterFileError(f"{found}; of bare parameters only those of experts can be read.", where=where)
        refuse_bias(config, where)
        if config.get("ensure_weight_tying") and config.get("modules_to_save"):
            raise AdapterFileError("ensure_weight_tying is set, which ties whole modules of an adapter.", where=where)
        init = config.get("init_lora_weights", True)
        if not isinstance(init, str) or init in ("gaussian", "orthogonal", "eva"):
            return
        if init.startswith(_CHANGES_BACKBONE):
            raise AdapterFileError(
                f"init_lora_weights is {init!r}, which changes the weights of the shared backbone.",
                where=where,
                hint="Save it again with PEFT's path_initial_model_for_weight_conversion.",
            )
        raise AdapterFileError(f"init_lora_weights is {describe(init)}, which is not supported yet.", where=where)

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        start = config.get("init_lora_weights", True)
        return {
            "r": config.get("r", DEFAULTS["r"]),
            "lora_alpha": config.get("lora_alpha", DEFAULTS["lora_alpha"]),
            "lora_dropout": config.get("lora_dropout", 0.0),
            "rank_pattern": config.get("rank_pattern") or {},
            "alpha_pattern": config.get("alpha_pattern") or {},
            "use_rslora": config.get("use_rslora", False),
            # What eva looks at is the data of the job that it started.
            "init_lora_weights": True if start == "eva" else start,
            "trainable_token_indices": config.get("trainable_token_indices"),
            "modules_to_save": config.get("modules_to_save"),
        }

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        a_RD, b_OR = tensors
        if is_expert_path(path):
            return
        shapes = f"lora_A {tuple(a_RD.shape)} and lora_B {tuple(b_OR.shape)}"
        if a_RD.ndim != 2 or b_OR.ndim != 2 or not a_RD.numel() or not b_OR.numel():
            raise AdapterFileError(f"{path} has {shapes}; expected two matrices (r, in) and (out, r).", where=where)
        if a_RD.shape[0] != b_OR.shape[1]:
            raise AdapterFileError(f"{path} has {shapes}; their ranks differ.", where=where)
        if a_RD.shape[0] != spec.rank_for(path):
            raise AdapterFileError(
                f"{path} has rank {a_RD.shape[0]}, but adapter_config.json has {spec.rank_for(path)}.", where=where
            )

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, ...]:
        a, b = tensors
        experts = [max(len(a), len(b))] if a.ndim == 3 else []
        return *experts, b.shape[-2], a.shape[-1]

    def what_it_is(self, name: str) -> str:
        if "lora_embedding_" in name:
            return "an adapter on an embedding; only linear layers can be adapted"
        if "lora_magnitude_vector" in name:
            return "which is DoRA's, but use_dora of its config is off"
        if name.endswith(".lora_B.bias"):
            return "a LoRA bias, which is not supported yet"
        return "which is neither a lora_A nor a lora_B weight"

    def summary(self, spec: AdapterSpec) -> str:
        stabilised = ", rank-stabilised scaling" if spec.use_rslora else ""
        rows = ", with rows of tokens" if spec.trains_rows else ""
        base = ", for the base quantised as in training" if spec.init_lora_weights == "loftq" else ""
        return f"rank {spec.r}, alpha {spec.default_alpha:g}{stabilised}{rows}{base}"


def _listed(indices: TokenIds | Mapping[str, TokenIds] | None) -> list[int] | dict[str, list[int]] | None:
    if isinstance(indices, Mapping):
        return {name: list(ids) for name, ids in indices.items()}
    return None if indices is None else list(indices)


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


class Lora(Method):
    groups: tuple[str, ...] = ("a", "b")
    has_any_order_kernels = True
    files: PeftFormat = LoraFiles()

    def kernel_rank(self, spec: AdapterSpec) -> int:
        return max([spec.r, *spec.rank_pattern.values()])

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
        """ConfigError if a rank is larger than a module allows; a gate, which has one output, allows any."""
        for path, (*_, num_out, num_in) in modules.items():
            rank = spec.rank_for(path)
            if rank > min(num_out, num_in) and num_out > 1:
                raise ConfigError(
                    f"rank {rank} is above the smaller side of {path} ({num_out} x {num_in}).",
                    where="adapter.r" if rank == spec.r else "adapter.rank_pattern",
                )

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        *experts, num_out, num_in = linear
        rank = spec.rank_for(path)
        if not experts:
            return (rank, num_in), (num_out, rank)
        # Shared are the sides that meet the hidden states: A of gate and up, B of down.
        is_down, is_shared = path.endswith(DOWN), spec.experts == "shared"
        num_a, num_b = (1 if is_shared and side else experts[0] for side in (not is_down, is_down))
        return (num_a, rank, num_in), (num_b, num_out, rank)

    def frozen(self, spec: AdapterSpec) -> tuple[str, ...]:
        return ("a",) if spec.freeze_a else ()

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        shape_a, shape_b = self.shapes(spec, path, site.shape)[:2]
        *_, rank, num_in = shape_a

        def uniform(shape: tuple[int, ...]) -> torch.Tensor:
            # Kaiming-uniform with a = sqrt(5), the start of every torch Linear: uniform in ±1/sqrt(fan_in).
            # In place: these are hundreds of millions of numbers on the way to the first step.
            return torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(math.sqrt(shape[-1]))

        if spec.init_lora_weights == "loftq" and site.read_original is not None:
            lost_OD = site.read_original().float() - site.share.joined(frozen_weight(site)).float()
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
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        if isinstance(site, ExpertSite):
            (a_ERD, b_EOR), (grad_a_ERD, grad_b_EOR) = params, grads
            return ExpertLoraWeights(a_ERD, b_EOR, grad_a_ERD, grad_b_EOR, spec.scale_for(path), site.columns)
        return self.lora_weights(spec, path, site, params, grads)

    def lora_weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> LoraWeights:
        """The weights of A and B, for subclasses with more parameters."""
        (a_RD, b_OR), (grad_a_RD, grad_b_OR) = params, grads
        return LoraWeights(
            a_RD=a_RD,
            b_OR=b_OR,
            grad_a_RD=grad_a_RD,
            grad_b_OR=grad_b_OR,
            scale=spec.scale_for(path),
            dropout=spec.lora_dropout,
            key=module_key(path),
            first_input=site.share.inputs.start,
        )

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        rate_b = job.loraplus_lr_ratio or 1.0
        return (rate_b,) if job.adapter.freeze_a else (1.0, rate_b)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        linears = {path: weights for path, weights in adapter.modules.items() if isinstance(weights, LoraWeights)}
        return ComputeCopy(adapter, dtype, linears)

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        (a_RD, b_OR), weight_OD = tensors, linear.weight
        update_OD = spec.scale_for(path) * (b_OR.float() @ a_RD.float())
        weight_OD.copy_((weight_OD.float() + update_OD.to(weight_OD.device)).to(weight_OD.dtype))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        return spec.rank_for(path)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        return CostRanks(spec.r, max([spec.r, *spec.rank_pattern.values()]))


METHODS: dict[str, Method] = {"lora": Lora()}
