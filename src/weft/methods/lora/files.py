"""LoRA in PEFT's files: the keys of PEFT 0.21's LoraConfig, and lora_A (r, in) and lora_B (out, r) of every module.

A setting that changes what the weights mean and that we do not implement is refused by name, so an adapter is never
quietly read as something it is not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from weft.adapters.method import ModuleTensors, PeftFormat
from weft.errors import AdapterFileError
from weft.methods.lora.config import WORKED_OUT_STARTS
from weft.methods.lora.own_rows import TokenIds
from weft.settings.fields import describe
from weft.spec import AdapterSpec

DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}

_REFUSED = {
    "lora_bias": "LoRA with a bias is not supported yet",
    "layer_replication": "it changes the layers of the shared backbone",
    "kasa_config": "KaSA changes the weights of the shared backbone",
    "target_parameters": "adapters on bare parameters are not supported yet",
    "alora_invocation_tokens": "activated LoRA is not supported yet",
    "arrow_config": "Arrow routing is not supported yet",
    "megatron_config": "Megatron layers are not supported",
    "monteclora_config": "MonteCLoRA is not supported yet",
    "use_bdlora": "block-diagonal LoRA is not supported yet",
    "use_qalora": "QALoRA is not supported yet",
    "velora_config": "VeLoRA is not supported yet",
}
"""Settings that must be off, and why."""

_CHANGES_BACKBONE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraFiles(PeftFormat):
    """What PEFT's LoRA writes."""

    peft_type = "LORA"
    in_peft = True
    title = "LoRA"
    suffixes: Mapping[str, str] = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
    defaults: Mapping[str, Any] = DEFAULTS
    refused: Mapping[str, str] = _REFUSED

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """Ranks, scales, dropout and start."""
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
        """Refuses trained biases, tied copies of modules and starts that change the backbone."""
        bias = config.get("bias", "none")
        if bias != "none":
            raise AdapterFileError(
                f"bias is {describe(bias)}, which trains biases of the shared backbone; only 'none' can be read.",
                where=where,
            )
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
        """Ranks, scales, dropout and start."""
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
        """Two matrices of the rank that the config says."""
        a_RD, b_OR = tensors
        shapes = f"lora_A {tuple(a_RD.shape)} and lora_B {tuple(b_OR.shape)}"
        if a_RD.ndim != 2 or b_OR.ndim != 2 or not a_RD.numel() or not b_OR.numel():
            raise AdapterFileError(f"{path} has {shapes}; expected two matrices (r, in) and (out, r).", where=where)
        if a_RD.shape[0] != b_OR.shape[1]:
            raise AdapterFileError(f"{path} has {shapes}; their ranks differ.", where=where)
        if a_RD.shape[0] != spec.rank_for(path):
            raise AdapterFileError(
                f"{path} has rank {a_RD.shape[0]}, but adapter_config.json says {spec.rank_for(path)}.", where=where
            )

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        """B has the outputs, A the inputs."""
        a_RD, b_OR = tensors
        return b_OR.shape[0], a_RD.shape[1]

    def what_it_is(self, name: str) -> str:
        """Why a tensor that is no lora_A or lora_B weight cannot be read."""
        if "lora_embedding_" in name:
            return "an adapter on an embedding; only linear layers can be adapted"
        if "lora_magnitude_vector" in name:
            return "which is DoRA's, but use_dora of its config is off"
        if name.endswith(".lora_B.bias"):
            return "a LoRA bias, which is not supported yet"
        return "which is neither a lora_A nor a lora_B weight"

    def summary(self, spec: AdapterSpec) -> str:
        """Rank and scale."""
        stabilised = ", rank-stabilised scaling" if spec.use_rslora else ""
        rows = ", with rows of tokens" if spec.trains_rows else ""
        base = ", for the base quantised as in training" if spec.init_lora_weights == "loftq" else ""
        return f"rank {spec.r}, alpha {spec.default_alpha:g}{stabilised}{rows}{base}"


def _listed(indices: TokenIds | Mapping[str, TokenIds] | None) -> list[int] | dict[str, list[int]] | None:
    """Ids of tokens as JSON has them."""
    if isinstance(indices, Mapping):
        return {name: list(ids) for name, ids in indices.items()}
    return None if indices is None else list(indices)


def _whole(value: float) -> float | int:
    """An int when the number is whole, as PEFT writes it."""
    return int(value) if float(value).is_integer() else value
