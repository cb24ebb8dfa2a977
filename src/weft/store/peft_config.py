"""PEFT's adapter_config.json and our AdapterSpec, each from the other.

The keys are those of PEFT 0.21's LoraConfig. A setting that changes what the weights mean and that we do not implement
is refused by name, so an adapter is never quietly read as something it is not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from weft.errors import AdapterFileError, ConfigError
from weft.spec import AdapterSpec
from weft.spec.fields import describe, read

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
"""Every key PEFT writes and its default, except peft_version, which PEFT fills in when it reads a file without it."""

_REFUSED = {
    "use_dora": "DoRA is not supported yet",
    "lora_bias": "LoRA with a bias is not supported yet",
    "modules_to_save": "it carries whole modules that would replace those of the shared backbone",
    "trainable_token_indices": "it changes rows of the shared backbone's embedding",
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
_KNOWN = {*DEFAULTS, "peft_version", "runtime_config"}


def config_of(spec: AdapterSpec, *, base_model: str, target_names: Iterable[str]) -> dict[str, Any]:
    """All of adapter_config.json for one adapter."""
    # The two patterns keep their order: the first match wins.
    own = {
        "alpha_pattern": {name: _whole(value) for name, value in spec.alpha_pattern.items()},
        "base_model_name_or_path": base_model,
        "exclude_modules": _as_list(spec.exclude_modules),
        "init_lora_weights": spec.init_lora_weights,
        "layers_to_transform": _as_list(spec.layers_to_transform),
        "lora_alpha": _whole(default_alpha(spec)),
        "lora_dropout": spec.lora_dropout,
        "r": spec.r,
        "rank_pattern": dict(spec.rank_pattern),
        "target_modules": sorted(target_names),
        "use_rslora": spec.use_rslora,
    }
    return DEFAULTS | own


def default_alpha(spec: AdapterSpec) -> float:
    """The alpha of modules that no pattern names."""
    return 2.0 * spec.r if spec.lora_alpha is None else spec.lora_alpha


def is_target(spec: AdapterSpec, path: str) -> bool:
    """PEFT's rule: whether an adapter with this spec sits on a module path (`all-linear` is taken as all)."""
    excluded = spec.exclude_modules
    if isinstance(excluded, str) and re.fullmatch(excluded, path):
        return False
    if isinstance(excluded, tuple) and _ends_with(path, excluded):
        return False
    names = spec.target_modules
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, path) is not None
    if path in names:
        return True
    return _ends_with(path, names) and _in_layers(path, spec.layers_to_transform)


def spec_of(config: Mapping[str, Any], module_paths: Collection[str], *, where: str) -> AdapterSpec:
    """The adapter that a PEFT config and the paths of its weights describe; AdapterFileError if we cannot train it."""
    _refuse_unsupported(config, where)
    config = {key: value for key, value in config.items() if value is not None}
    targets = config.get("target_modules")
    layers = config.get("layers_to_transform")
    if not targets:
        raise AdapterFileError("target_modules is missing; name the adapted modules.", where=where)
    if config.get("layers_pattern"):
        # Our spec has no layers_pattern; the weights say which modules it meant.
        targets, layers = list(module_paths), None
    values = {
        "r": config.get("r", DEFAULTS["r"]),
        "lora_alpha": config.get("lora_alpha", DEFAULTS["lora_alpha"]),
        "lora_dropout": config.get("lora_dropout", 0.0),
        "target_modules": targets,
        "exclude_modules": config.get("exclude_modules") or None,
        "layers_to_transform": None if layers == [] else layers,
        "rank_pattern": config.get("rank_pattern") or {},
        "alpha_pattern": config.get("alpha_pattern") or {},
        "use_rslora": config.get("use_rslora", False),
        "init_lora_weights": config.get("init_lora_weights", True),
    }
    try:
        spec = read(AdapterSpec, values)
    except ConfigError as error:
        raise AdapterFileError(error.message, where=f"{where}: {error.where}" if error.where else where) from None
    if isinstance(spec.target_modules, tuple):
        # PEFT writes a set, in another order each time.
        spec = dataclasses.replace(spec, target_modules=tuple(sorted(spec.target_modules)))
    return spec


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterFileError(f"peft_type is {describe(kind)}; only LORA can be read.", where=where)
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise AdapterFileError(f"task_type is {describe(task)}; only CAUSAL_LM can be read.", where=where)
    bias = config.get("bias", "none")
    if bias != "none":
        raise AdapterFileError(
            f"bias is {describe(bias)}, which trains biases of the shared backbone; only 'none' can be read.",
            where=where,
        )
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise AdapterFileError(f"{key} is set, and {reason}.", where=where)
    for key in sorted(config.keys() - _KNOWN):
        if config[key]:
            raise AdapterFileError(
                f"has the unknown setting {key} = {describe(config[key])}; what PEFT 0.21 writes can be read.",
                where=where,
            )
    _refuse_init(config.get("init_lora_weights", True), where)


def _refuse_init(init: Any, where: str) -> None:
    if not isinstance(init, str) or init in ("gaussian", "orthogonal"):
        return
    if init.startswith(_CHANGES_BACKBONE):
        raise AdapterFileError(
            f"init_lora_weights is {init!r}, which changes the weights of the shared backbone.",
            where=where,
            hint="Save it again with PEFT's path_initial_model_for_weight_conversion.",
        )
    raise AdapterFileError(f"init_lora_weights is {describe(init)}, which is not supported yet.", where=where)


def _ends_with(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _in_layers(path: str, layers: tuple[int, ...] | None) -> bool:
    """Whether the first numbered part of the path is one of the layers."""
    if not layers:
        return True
    match = re.match(r".*?\.[^.]*\.(\d+)\.", path)
    return match is not None and int(match[1]) in layers


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _whole(value: float) -> float | int:
    """An int when the number is whole, as PEFT writes it."""
    return int(value) if float(value).is_integer() else value
