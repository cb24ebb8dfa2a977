"""Sparse differences in directories of PEFT's form: positions and values; PEFT has no such method."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from weft.adapters.method import ModuleTensors, PeftFormat
from weft.errors import AdapterFileError
from weft.methods.diff_pruning.positions import num_positions
from weft.spec import AdapterSpec

DEFAULTS: dict[str, Any] = {
    "base_model_name_or_path": None,
    "density": None,
    "exclude_modules": None,
    "mask": "magnitude",
    "peft_type": "DIFF_PRUNING",
    "target_modules": None,
    "task_type": "CAUSAL_LM",
}


class DiffPruningFiles(PeftFormat):
    """What Weft writes of a sparse difference."""

    peft_type = "DIFF_PRUNING"
    title = "diff pruning"
    suffixes: Mapping[str, str] = {"indices": "diff.indices", "shape": "diff.shape", "values": "diff.values"}
    defaults: Mapping[str, Any] = DEFAULTS

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """How many positions there may be, and how they were chosen."""
        return {"density": spec.density, "mask": spec.mask}

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """Needs the density, which says how many values an adapter has room for."""
        if config.get("density") is None:
            raise AdapterFileError("density is missing.", where=where)

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys are the settings."""
        return {name: config[name] for name in ("density", "mask") if name in config}

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """As many values as positions, every position once, ascending, and no more than the density allows."""
        indices, shape, values = tensors
        if indices.dim() != 1 or indices.shape != values.shape or shape.numel() != 2:
            found = f"indices {tuple(indices.shape)} and values {tuple(values.shape)}"
            raise AdapterFileError(f"{path} has {found}; expected as many of both, and a shape of two.", where=where)
        size = int(shape[0]) * int(shape[1])
        bounded = torch.cat([torch.tensor([-1]), indices.long(), torch.tensor([size])])
        if not bool((bounded[1:] > bounded[:-1]).all()):
            raise AdapterFileError(f"{path} has indices that do not ascend from 0 to below {size}.", where=where)
        room = num_positions(spec.density, size)
        if len(indices) > room:
            raise AdapterFileError(f"{path} has {len(indices)} values; density allows {room}.", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        """The file says it."""
        return int(tensors[1][0]), int(tensors[1][1])

    def what_it_is(self, name: str) -> str:
        """Why a tensor that is no difference cannot be read."""
        return "which is neither indices nor values of a sparse difference"

    def summary(self, spec: AdapterSpec) -> str:
        """How much has changed."""
        most = "at most " if spec.mask == "l0" else ""
        return f"{most}{spec.density:.4%} of the adapted weights' numbers differ from those of the base"
