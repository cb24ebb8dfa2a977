"""VeRA (Kopiczko et al. 2023): per module two vectors d (r) and b (out) around random matrices that all modules share.

It computes x Wᵀ + b ⊙ (d ⊙ drop(x) Aᵀ) Bᵀ with the corners A (r, in) and B (out, r) of the shared matrices. These
follow from `projection_prng_key` and are never trained or checkpointed. Files have the keys of PEFT 0.21's VeraConfig,
and vera_lambda_d (r) and vera_lambda_b (out) of modules; with `save_projection` also the two shared matrices, which are
compared with those of the settings when a file is read, and never used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from weft.adapters.adapter import Adapter
from weft.adapters.method import (
    CostRanks,
    KernelCopy,
    LinearShape,
    Method,
    ModuleTensors,
    PeftFormat,
    Site,
    SlotWeights,
    peft_keys,
    refuse_bias,
)
from weft.errors import AdapterFileError
from weft.kernels.dropout import module_key
from weft.methods.vera.weights import VeraCopy, VeraWeights, compile_scales, draw, projection_for
from weft.spec import AdapterSpec


class VeraFiles(PeftFormat):
    peft_type = "VERA"
    in_peft = True
    title = "VeRA"
    suffixes: Mapping[str, str] = {"vera_lambda_d": "vera_lambda_d", "vera_lambda_b": "vera_lambda_b"}
    defaults: Mapping[str, Any] = peft_keys(
        peft_type,
        "layers_pattern",
        "layers_to_transform",
        "target_modules",
        bias="none",
        d_initial=0.1,
        fan_in_fan_out=False,
        init_weights=True,
        projection_prng_key=0,
        r=256,
        save_projection=True,
        vera_dropout=0.0,
    )

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        return {
            "d_initial": spec.d_initial,
            "layers_to_transform": None if spec.layers_to_transform is None else list(spec.layers_to_transform),
            "projection_prng_key": spec.projection_prng_key,
            "r": spec.vera_rank,
            "save_projection": spec.save_projection,
            "vera_dropout": spec.lora_dropout,
        }

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        refuse_bias(config, where)

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "vera_rank": config.get("r", self.defaults["r"]),
            "projection_prng_key": config.get("projection_prng_key", 0),
            "save_projection": config.get("save_projection", True),
            "d_initial": config.get("d_initial", self.defaults["d_initial"]),
            "lora_dropout": config.get("vera_dropout", 0.0),
        }

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        d_R, b_O = tensors
        if d_R.shape != (spec.vera_rank,) or b_O.ndim != 1 or not b_O.numel():
            raise AdapterFileError(
                f"{path} has vera_lambda_d {tuple(d_R.shape)} and vera_lambda_b {tuple(b_O.shape)}; "
                f"expected ({spec.vera_rank},) and one number for each output.",
                where=where,
            )

    def shared_names(self, config: Mapping[str, Any]) -> Collection[str]:
        return ("vera_A", "vera_B") if config.get("save_projection", True) else ()

    def check_shared(self, spec: AdapterSpec, shared: Mapping[str, torch.Tensor], where: str) -> None:
        """The matrices must equal those of the key, to the rounding of the file."""
        a_RD, b_OR = shared["vera_A"], shared["vera_B"]
        shapes = f"vera_A {tuple(a_RD.shape)} and vera_B {tuple(b_OR.shape)}"
        rank = spec.vera_rank
        if a_RD.ndim != 2 or b_OR.ndim != 2 or a_RD.shape[0] != rank or b_OR.shape[1] != rank:
            raise AdapterFileError(f"has {shapes}; expected ({rank}, in) and (out, {rank}).", where=where)
        drawn = draw(spec.projection_prng_key, rank, (b_OR.shape[0], a_RD.shape[1]))
        for name, mine in drawn.items():
            if not torch.allclose(mine, shared[name].float(), rtol=1e-2, atol=1e-6):
                raise AdapterFileError(
                    f"vera_A and vera_B are not those that projection_prng_key {spec.projection_prng_key} draws, and "
                    "other matrices cannot be read.",
                    where=where,
                )

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        return tensors[1].shape[0], None

    def what_it_is(self, name: str) -> str:
        if name.endswith((".vera_A", ".vera_B")):
            return "though save_projection of its config is off"
        return "which is neither a vera_lambda_d nor a vera_lambda_b vector"

    def summary(self, spec: AdapterSpec) -> str:
        return f"rank {spec.vera_rank}, projections of the key {spec.projection_prng_key}"


class Vera(Method):
    groups: tuple[str, ...] = ("d", "b")
    files: PeftFormat = VeraFiles()

    def kernel_bytes(self, spec: AdapterSpec, modules: Mapping[str, LinearShape], each: int) -> int:
        """B with both vectors applied, and its gradient."""
        return sum(num_out for num_out, _ in modules.values()) * spec.vera_rank * (each + 4)

    def kernel_rank(self, spec: AdapterSpec) -> int:
        return spec.vera_rank

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        return (spec.vera_rank,), (linear[0],)

    def shared(
        self, spec: AdapterSpec, modules: Mapping[str, LinearShape], device: torch.device
    ) -> Mapping[str, torch.Tensor]:
        return projection_for(spec.projection_prng_key, spec.vera_rank, modules.values(), device)

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        return torch.full((spec.vera_rank,), spec.d_initial), torch.zeros(site.out_features)

    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        d_R, b_O, a_RD, b_OR = params
        nothing = a_RD.new_empty(0)
        return VeraWeights(
            a_RD=a_RD[:, site.share.inputs],
            b_OR=b_OR[site.share.outputs],
            grad_a_RD=nothing,
            grad_b_OR=nothing,
            scale=1.0,
            dropout=spec.lora_dropout,
            key=module_key(path),
            first_input=site.share.inputs.start,
            d_R=d_R,
            b_O=b_O,
            grad_d_R=grads[0],
            grad_b_O=grads[1],
        )

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        return VeraCopy(adapter, dtype, cast(dict[str, VeraWeights], adapter.modules))

    def compile_copy(self, rank: int, linears: Sequence[LinearShape], like: torch.Tensor) -> None:
        compile_scales(rank, linears, like)

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        weight_OD = linear.weight
        d_R, b_O, a_RD, b_OR = (tensor.float().to(weight_OD.device) for tensor in tensors)
        num_out, num_in = weight_OD.shape
        update_OD = (b_O[:, None] * b_OR[:num_out]) @ (d_R[:, None] * a_RD[:, :num_in])
        weight_OD.copy_((weight_OD.float() + update_OD).to(weight_OD.dtype))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        return spec.vera_rank

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Its products cost those of a LoRA of its rank; its memory, including the shared matrices, is far less."""
        return CostRanks(spec.vera_rank, 2 + spec.vera_rank // 64)


METHODS: dict[str, Method] = {"vera": Vera()}
