"""Names of an adapter's tensors where its base is part of a larger model.

Weft trains the text model of a vision-language model. Servers, and some classes of transformers, load the whole one,
whose decoder is under `language_model.`; an adapter without that part of its names would be loaded as no adapter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from weft.settings import is_expert_path

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
