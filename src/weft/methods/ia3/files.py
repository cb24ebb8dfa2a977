"""IA³ in PEFT's files: the keys of PEFT 0.21's IA3Config, and ia3_l of every module, (out, 1) or (1, in)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from weft.adapters.method import ModuleTensors, PeftFormat
from weft.errors import AdapterFileError
from weft.spec import AdapterSpec

DEFAULTS: dict[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "feedforward_modules": None,
    "inference_mode": True,
    "init_ia3_weights": True,
    "modules_to_save": None,
    "peft_type": "IA3",
    "revision": None,
    "target_modules": None,
    "task_type": "CAUSAL_LM",
}


class Ia3Files(PeftFormat):
    """What PEFT's IA³ writes."""

    peft_type = "IA3"
    in_peft = True
    title = "IA³"
    suffixes: Mapping[str, str] = {"ia3_l": "ia3_l"}
    defaults: Mapping[str, Any] = DEFAULTS

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """Which modules have their inputs scaled: names of `target_names`, which PEFT asks to be among those."""
        inputs = {path for path in paths if spec.is_feedforward(path)}
        names = [name for name in target_names if any(_ends(path, name) for path in inputs)]
        if any(_ends(path, name) for path in set(paths) - inputs for name in names):
            # A name that some modules have with scaled inputs and some with scaled outputs: only whole paths tell.
            names, target_names = sorted(inputs), sorted(paths)
        return {
            "feedforward_modules": names,
            "init_ia3_weights": spec.init_ia3_weights,
            "target_modules": list(target_names),
        }

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """Needs the feed-forward modules by name, as PEFT writes them."""
        if config.get("feedforward_modules") is None:
            raise AdapterFileError("feedforward_modules is missing; name them, or write an empty list.", where=where)

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Which modules have their inputs scaled, and the start."""
        given = config["feedforward_modules"]
        return {
            "feedforward_modules": sorted(given) if isinstance(given, list) else given,
            "init_ia3_weights": config.get("init_ia3_weights", True),
        }

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """One row for the inputs of a feed-forward module, one column for the outputs of another."""
        shape = tuple(tensors[0].shape)
        side, expected = (0, "(1, in)") if spec.is_feedforward(path) else (1, "(out, 1)")
        if len(shape) != 2 or shape[side] != 1 or not tensors[0].numel():
            raise AdapterFileError(f"{path} has ia3_l {shape}; expected {expected}.", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        """A row tells the inputs, a column the outputs."""
        rows, columns = tensors[0].shape
        return (rows, None) if columns == 1 else (None, columns)

    def what_it_is(self, name: str) -> str:
        """Why a tensor that is no ia3_l cannot be read."""
        return "which is no ia3_l vector"

    def summary(self, spec: AdapterSpec) -> str:
        """What is scaled."""
        return "keys, values and feed-forward activations are scaled by learned vectors"


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
