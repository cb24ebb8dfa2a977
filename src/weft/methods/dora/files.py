"""DoRA in PEFT's files: those of a LoRA with `use_dora`, and lora_magnitude_vector (out) of every module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from weft.adapters.method import ModuleTensors
from weft.errors import AdapterFileError
from weft.methods.lora.files import LoraFiles
from weft.spec import AdapterSpec

MAGNITUDE = "lora_magnitude_vector"


class DoraFiles(LoraFiles):
    """What PEFT's LoRA writes with `use_dora`."""

    marker: str | None = "use_dora"
    title = "DoRA"
    suffixes: Mapping[str, str] = {**LoraFiles.suffixes, MAGNITUDE: MAGNITUDE}

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """LoRA's settings, and what tells it from LoRA."""
        return {**super().config(spec, target_names, paths), "use_dora": True}

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """LoRA's two matrices, and one length for each output."""
        a_RD, b_OR, m_O = tensors
        super().check_tensors(spec, path, (a_RD, b_OR), where)
        if m_O.shape != b_OR.shape[:1]:
            raise AdapterFileError(
                f"{path} has {MAGNITUDE} {tuple(m_O.shape)}; expected ({b_OR.shape[0]},), one length for each output.",
                where=where,
            )

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        """As LoRA's two matrices say."""
        return super().linear_shape(tensors[:2])

    def what_it_is(self, name: str) -> str:
        """Why a tensor that is none of DoRA's cannot be read."""
        return super().what_it_is(name).replace("neither a lora_A nor a lora_B weight", "no tensor of a DoRA")
