"""Converts between PEFT's adapter_config.json and our AdapterSpec.

The keys that all methods share are here; the keys of a method are written and read by its own `PeftFormat`. A key that
changes the meaning of the weights and is not supported is refused by name, so an adapter is never misread silently.

Weft trains the text model of a vision-language model. Servers, and some classes of transformers, load the whole one,
whose decoder is under `language_model.`; an adapter without that part of its names would be loaded as no adapter.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weft.adapters.method import Attachment, PeftFormat
from weft.adapters.parts import HEAD
from weft.errors import AdapterFileError, ConfigError
from weft.methods.registry import METHODS, cost_ranks, method_of
from weft.settings import describe, is_expert_path, listed, read
from weft.spec import AdapterSpec
from weft.store.expert_files import ORDER_KEY

TASKS = ("SEQ_CLS", "TOKEN_CLS")
HEADS = (HEAD, "classifier")
"""Parts that PEFT saves of a model for classification; a decoder has only the first."""


def config_of(
    spec: AdapterSpec, *, base_model: str, target_names: Iterable[str], paths: Collection[str]
) -> dict[str, Any]:
    """All of adapter_config.json for one adapter on the modules `paths`."""
    files, names = method_of(spec).files, sorted(target_names)
    excluded = spec.exclude_modules
    shared = {
        "base_model_name_or_path": base_model,
        "exclude_modules": list(excluded) if isinstance(excluded, tuple) else excluded,
        "target_modules": names,
    }
    return {
        **files.defaults,
        **{key: value for key, value in shared.items() if key in files.defaults},
        **files.config(spec, names, paths),
    }


def method_named(config: Mapping[str, Any], where: str) -> str:
    """The method of a PEFT config, by our name; AdapterFileError if it is not supported."""
    kind = config.get("peft_type")
    known = {name: method.files for name, method in METHODS.items()}
    of_kind = {name: files for name, files in known.items() if files.peft_type == kind}
    if not of_kind:
        kinds = sorted({files.peft_type for files in known.values()})
        raise AdapterFileError(f"peft_type is {describe(kind)}; only {listed(kinds)} can be read.", where=where)
    marked = (name for name, files in of_kind.items() if files.marker is not None and config.get(files.marker))
    return next(marked, None) or next(name for name, files in of_kind.items() if files.marker is None)


def spec_of(
    config: Mapping[str, Any],
    module_paths: Collection[str],
    *,
    where: str,
    has_head: bool = False,
    has_experts: bool = False,
) -> AdapterSpec:
    """The adapter that a PEFT config and the paths of its weights describe; AdapterFileError if it cannot be
    trained."""
    method = method_named(config, where)
    files = METHODS[method].files
    if has_head:
        config = _without_head(config)
    _refuse_unsupported(config, files, where)
    config = {key: value for key, value in config.items() if value is not None}
    targets = config.get("target_modules")
    layers = config.get("layers_to_transform")
    if not targets and "target_modules" in files.defaults and not has_experts:
        raise AdapterFileError("target_modules is missing; name the adapted modules.", where=where)
    if config.get("layers_pattern"):
        # Our spec has no layers_pattern; the weights show which modules it meant.
        targets, layers = list(module_paths), None
    if has_experts:
        # Names of experts' linears are names of linears beside them too, where there are such.
        targets = sorted(
            path for path in module_paths if not isinstance(targets, list) or path.endswith(tuple(targets))
        )
    values = {
        "method": method,
        **({"target_modules": targets} if targets or has_experts else {}),
        **({"experts": "full"} if has_experts else {}),
        "exclude_modules": config.get("exclude_modules") or None,
        "layers_to_transform": None if layers == [] else layers,
        **files.settings(config),
    }
    try:
        spec = read(AdapterSpec, values)
    except ConfigError as error:
        raise AdapterFileError(error.message, where=f"{where}: {error.where}" if error.where else where) from None
    if isinstance(spec.target_modules, tuple):
        # PEFT writes a set, in another order each time.
        spec = dataclasses.replace(spec, target_modules=tuple(sorted(spec.target_modules)))
    return spec


def _without_head(config: Mapping[str, Any]) -> dict[str, Any]:
    whole = {key: value for key, value in config.items() if key not in ("task_type", "modules_to_save")}
    saved = [name for name in config.get("modules_to_save") or [] if name not in HEADS]
    task = config.get("task_type")
    return {**whole, "modules_to_save": saved or None, "task_type": None if task in TASKS else task}


def _refuse_unsupported(config: Mapping[str, Any], files: PeftFormat, where: str) -> None:
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise AdapterFileError(f"task_type is {describe(task)}; only CAUSAL_LM can be read.", where=where)
    if config.get("modules_to_save") and files.peft_type != "LORA":
        reason = "it carries whole modules, which only LoRA adapters can have here"
        raise AdapterFileError(f"modules_to_save is set, and {reason}.", where=where)
    for key, reason in files.refused.items():
        if config.get(key):
            raise AdapterFileError(f"{key} is set, and {reason}.", where=where)
    for key in sorted(config.keys() - {*files.defaults, "peft_version", "runtime_config", ORDER_KEY}):
        if config[key]:
            raise AdapterFileError(
                f"has the unknown setting {key} = {describe(config[key])}; what PEFT 0.21 writes can be read.",
                where=where,
            )
    files.check_config(config, where)


SERVERS = ("vllm", "sglang", "peft", "tinker")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank accepts."""
VLLM_DEFAULT_RANK = 16

_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tinker": "Tinker"}
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
_MODULES = _ATTENTION | _MLP | {"lm_head"}
"""Linear modules that both servers can adapt."""
_MIXERS = frozenset({"in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj", "out_proj"})
"""Those of mixers with a state. SGLang has other names for them, so it would serve the base alone."""


@dataclass(frozen=True)
class ServingRemark:
    text: str
    refused: bool
    """True: the server refuses the adapter or would serve it wrongly. False: it works with the options in the text."""

    def __str__(self) -> str:
        return self.text


def check_servable(spec: AdapterSpec, module_paths: Collection[str], server: str) -> list[ServingRemark]:
    """Reasons for which a server would refuse the adapter, and the options it needs; empty if there are none."""
    if server not in SERVERS:
        raise ConfigError(f"{server!r} is not a known server; accepted are {', '.join(SERVERS)}.")
    method = method_of(spec)
    title = method.files.title
    if server == "peft":
        return (
            [] if method.files.in_peft else [ServingRemark(f"PEFT has no {title}; only Weft runs this adapter.", True)]
        )
    if not spec.config.is_served:
        only = f"{_TITLES[server]} takes LoRA adapters only"
        if method.attachment is not Attachment.LINEAR:
            return [ServingRemark(f"{only}, and this {title} cannot be merged into its base.", True)]
        return [ServingRemark(f"{only}; merge this {title} into {spec.config.merges_into}.", True)]
    if spec.trains_rows:
        problem = f"{_TITLES[server]} takes adapters on linear modules only, and this {title} has rows of tokens"
        return [ServingRemark(f"{problem}; merge it into its base.", True)]
    if server == "tinker":
        kinds = ("none", "shared")
        problem = f"Tinker's experts share their outer factors; this adapter has experts: {spec.experts}"
        return [] if spec.experts in kinds else [ServingRemark(f"{problem}; train experts: shared.", True)]
    remarks = _outside(module_paths, server)
    # Servers look at every pattern, also at those that match no module of this backbone.
    top = max(cost_ranks(spec).widest, 2 * spec.rank_of_experts if spec.experts in ("separate", "shared") else 0)
    return remarks + (_vllm_remarks(top) if server == "vllm" else _sglang_remarks(spec))


def _outside(module_paths: Collection[str], server: str) -> list[ServingRemark]:
    known = _MODULES | _MIXERS if server == "vllm" else _MODULES
    names = sorted({path.rpartition(".")[2] for path in module_paths} - known)
    if not names:
        return []
    return [ServingRemark(f"{_TITLES[server]} takes no adapters on {', '.join(names)}.", refused=True)]


def _vllm_remarks(top: int) -> list[ServingRemark]:
    if top <= VLLM_DEFAULT_RANK:
        return []
    fitting = [rank for rank in VLLM_RANKS if rank >= top]
    if not fitting:
        return [ServingRemark(f"vLLM takes ranks up to {VLLM_RANKS[-1]}; this adapter has {top}.", refused=True)]
    return [ServingRemark(f"Start vLLM with --max-lora-rank {fitting[0]}; this adapter has rank {top}.", refused=False)]


def _sglang_remarks(spec: AdapterSpec) -> list[ServingRemark]:
    remarks = []
    alpha = spec.default_alpha
    if any(rank != spec.r for rank in spec.rank_pattern.values()):
        remarks.append(ServingRemark("SGLang takes one rank per adapter; this one has a rank_pattern.", refused=True))
    if any(other != alpha for other in spec.alpha_pattern.values()):
        remarks.append(
            ServingRemark("SGLang takes one alpha per adapter; this one has an alpha_pattern.", refused=True)
        )
    if spec.experts != "none" and (spec.rank_of_experts, spec.alpha_of_experts) != (spec.r, alpha):
        remarks.append(ServingRemark("SGLang takes one rank and alpha; experts of this adapter have others.", True))
    if spec.use_rslora and spec.r > 1:
        remedy = f"set use_rslora to false and lora_alpha to {alpha * math.sqrt(spec.r)!r} in adapter_config.json"
        remarks.append(ServingRemark(f"SGLang ignores use_rslora and would scale too weakly; {remedy}.", refused=True))
    return remarks


T = TypeVar("T")
_PREFIX = "base_model.model."
_LONG = re.compile(r"(?:model\.language_model|language_model\.model)\.")
"""The decoder in a whole model: today, and in transformers 4."""
_LONG_HEAD = "language_model.lm_head"
_DECODER = "model."
_NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Settings without a meaning beside whole paths."""


def is_whole_model(config: Mapping[str, Any]) -> bool:
    """True if config.json describes a model whose decoder is a part of it, by the class that servers load."""
    classes = config.get("architectures") or [""]
    return "text_config" in config and not str(classes[0]).endswith("ForCausalLM")


def read_config(base: str) -> dict[str, Any] | None:
    """config.json of a model directory, or of a Hub model that is on this machine; None if there is none."""
    file = Path(base) / "config.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(base, "config.json")
        except HFValidationError:
            return None
        if not isinstance(found, str):
            return None
        file = Path(found)
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def short_name(path: str) -> str:
    """The path of a module in the text model."""
    if path.startswith(_LONG_HEAD):
        return path.removeprefix("language_model.")
    return _LONG.sub(_DECODER, path, count=1) if _LONG.match(path) else path


def long_name(path: str) -> str:
    """The path of a module of the text model in the whole one."""
    return f"model.language_model.{path.removeprefix(_DECODER)}" if path.startswith(_DECODER) else path


def renamed_tensors(tensors: Mapping[str, T], *, is_long: bool) -> dict[str, T]:
    """The tensors of an adapter's file with names of the whole model, or of the text model."""
    rename = long_name if is_long else short_name
    return {
        _PREFIX + rename(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else name: tensor
        for name, tensor in tensors.items()
    }


def renamed_config(config: Mapping[str, Any], modules: Iterable[str], *, is_long: bool) -> dict[str, Any]:
    """adapter_config.json where it targets exactly these modules, by their paths."""
    rename = long_name if is_long else short_name
    result = {**config, "target_modules": sorted(path for path in modules if not is_expert_path(path))}
    if config.get("target_parameters"):
        result["target_parameters"] = [rename(name) for name in config["target_parameters"]]
    if isinstance(config.get("feedforward_modules"), list):
        result["feedforward_modules"] = [rename(name) for name in config["feedforward_modules"]]
    return {**result, **{key: None for key in _NARROWING if key in config}}
