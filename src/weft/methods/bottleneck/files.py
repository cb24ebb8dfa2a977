"""Bottlenecks in directories of PEFT's form; PEFT has no such method, so only Weft reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from weft.adapters.method import ModuleTensors, PeftFormat
from weft.errors import AdapterFileError
from weft.spec import AdapterSpec

DEFAULTS: dict[str, Any] = {
    "base_model_name_or_path": None,
    "bottleneck_activation": "silu",
    "bottleneck_scale": 1.0,
    "bottleneck_size": None,
    "exclude_modules": None,
    "peft_type": "BOTTLENECK",
    "target_modules": None,
    "task_type": "CAUSAL_LM",
}


class BottleneckFiles(PeftFormat):
    """What Weft writes of a bottleneck."""

    peft_type = "BOTTLENECK"
    title = "bottleneck"
    suffixes: Mapping[str, str] = {
        "down": "down.weight",
        "down_bias": "down.bias",
        "up": "up.weight",
        "up_bias": "up.bias",
    }
    defaults: Mapping[str, Any] = DEFAULTS

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """All that the weights do not tell; where they sit is in target_modules."""
        return {
            "bottleneck_activation": spec.bottleneck_activation,
            "bottleneck_scale": spec.bottleneck_scale,
            "bottleneck_size": spec.bottleneck_size,
        }

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """Needs the size."""
        if config.get("bottleneck_size") is None:
            raise AdapterFileError("bottleneck_size is missing.", where=where)

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys are the settings."""
        names = ("bottleneck_activation", "bottleneck_scale", "bottleneck_size")
        return {name: config[name] for name in names if name in config}

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """Two matrices and two biases around an inner layer of the stated size."""
        down, bias, up, up_bias = (tuple(tensor.shape) for tensor in tensors)
        size, width = spec.bottleneck_size, up_bias[0] if len(up_bias) == 1 else 0
        if (down, bias, up) != ((size, width), (size,), (width, size)) or not width:
            raise AdapterFileError(
                f"{path} has down {down} and up {up}; expected ({size}, width) and (width, {size}) with their biases.",
                where=where,
            )

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        """The width of the block's output, twice."""
        return tensors[2].shape[0], tensors[0].shape[1]

    def what_it_is(self, name: str) -> str:
        """Why a tensor that is none of a bottleneck's cannot be read."""
        return "which is no tensor of a bottleneck"

    def summary(self, spec: AdapterSpec) -> str:
        """What stands behind which blocks."""
        return f"a layer of {spec.bottleneck_size} ({spec.bottleneck_activation}) behind blocks of the model"
