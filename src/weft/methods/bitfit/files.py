"""Changed biases in directories of PEFT's form; PEFT trains biases only beside a LoRA, so only Weft reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.adapters.method import ModuleTensors, PeftFormat
from weft.errors import AdapterFileError
from weft.spec import AdapterSpec

DEFAULTS: dict[str, Any] = {
    "base_model_name_or_path": None,
    "exclude_modules": None,
    "peft_type": "BITFIT",
    "target_modules": None,
    "task_type": "CAUSAL_LM",
}


class BitFitFiles(PeftFormat):
    """What Weft writes of changed biases: the changes, which start at zero."""

    peft_type = "BITFIT"
    title = "BitFit"
    suffixes: Mapping[str, str] = {"bias_change": "bias_change"}
    defaults: Mapping[str, Any] = DEFAULTS

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """One number per output."""
        shape = tuple(tensors[0].shape)
        if len(shape) != 1 or not shape[0]:
            raise AdapterFileError(f"{path} has bias_change {shape}; expected (out,).", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        """Tells the outputs."""
        return tensors[0].shape[0], None

    def what_it_is(self, name: str) -> str:
        """Why a tensor that is no change of a bias cannot be read."""
        return "which is no bias_change vector"

    def summary(self, spec: AdapterSpec) -> str:
        """What is trained."""
        return "only biases of linears differ from those of the base"
