"""VeRA in PEFT's files: the keys of PEFT 0.21's VeraConfig, and vera_lambda_d (r) and vera_lambda_b (out) of modules.

With `save_projection` the file has the two shared matrices as well. They follow from the other settings: what a file
holds is compared with that, and never used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from weft.adapters.method import ModuleTensors, PeftFormat
from weft.errors import AdapterFileError
from weft.methods.vera.projection import draw
from weft.settings.fields import describe
from weft.spec import AdapterSpec

DEFAULTS: dict[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "d_initial": 0.1,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "modules_to_save": None,
    "peft_type": "VERA",
    "projection_prng_key": 0,
    "r": 256,
    "revision": None,
    "save_projection": True,
    "target_modules": None,
    "task_type": "CAUSAL_LM",
    "vera_dropout": 0.0,
}


class VeraFiles(PeftFormat):
    """What PEFT's VeRA writes."""

    peft_type = "VERA"
    in_peft = True
    title = "VeRA"
    suffixes: Mapping[str, str] = {"vera_lambda_d": "vera_lambda_d", "vera_lambda_b": "vera_lambda_b"}
    defaults: Mapping[str, Any] = DEFAULTS

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """Rank, key, start and dropout."""
        return {
            "d_initial": spec.d_initial,
            "layers_to_transform": None if spec.layers_to_transform is None else list(spec.layers_to_transform),
            "projection_prng_key": spec.projection_prng_key,
            "r": spec.vera_rank,
            "save_projection": spec.save_projection,
            "vera_dropout": spec.lora_dropout,
        }

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """Refuses trained biases."""
        bias = config.get("bias", "none")
        if bias != "none":
            raise AdapterFileError(
                f"bias is {describe(bias)}, which trains biases of the shared backbone; only 'none' can be read.",
                where=where,
            )

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Rank, key, start and dropout."""
        return {
            "vera_rank": config.get("r", DEFAULTS["r"]),
            "projection_prng_key": config.get("projection_prng_key", 0),
            "save_projection": config.get("save_projection", True),
            "d_initial": config.get("d_initial", DEFAULTS["d_initial"]),
            "lora_dropout": config.get("vera_dropout", 0.0),
        }

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """Two vectors, one as long as the rank."""
        d_R, b_O = tensors
        if d_R.shape != (spec.vera_rank,) or b_O.ndim != 1 or not b_O.numel():
            raise AdapterFileError(
                f"{path} has vera_lambda_d {tuple(d_R.shape)} and vera_lambda_b {tuple(b_O.shape)}; "
                f"expected ({spec.vera_rank},) and one number for each output.",
                where=where,
            )

    def shared_names(self, config: Mapping[str, Any]) -> Collection[str]:
        """The two matrices, where they are saved."""
        return ("vera_A", "vera_B") if config.get("save_projection", True) else ()

    def check_shared(self, spec: AdapterSpec, shared: Mapping[str, torch.Tensor], where: str) -> None:
        """The matrices must be those of the key, to the rounding of the file."""
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
        """Only the outputs can be told."""
        return tensors[1].shape[0], None

    def what_it_is(self, name: str) -> str:
        """Why a tensor that is none of VeRA's cannot be read."""
        if name.endswith((".vera_A", ".vera_B")):
            return "though save_projection of its config is off"
        return "which is neither a vera_lambda_d nor a vera_lambda_b vector"

    def summary(self, spec: AdapterSpec) -> str:
        """Rank and key."""
        return f"rank {spec.vera_rank}, projections of the key {spec.projection_prng_key}"
