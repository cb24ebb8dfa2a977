"""The registry of methods: a base of MethodSettings for each folder that has one or several."""

from __future__ import annotations

from dataclasses import dataclass

from weft.methods.bitfit.config import BitFitSettings
from weft.methods.bottleneck.config import BottleneckSettings
from weft.methods.config import MethodConfig
from weft.methods.diff_pruning.config import DiffPruningSettings
from weft.methods.dora.config import DoraSettings
from weft.methods.ia3.config import Ia3Settings
from weft.methods.lora.config import LoraSettings
from weft.methods.vera.config import VeraSettings
from weft.methods.virtual_tokens.config import VirtualTokenSettings


@dataclass(frozen=True)
class MethodSettings(
    VirtualTokenSettings,
    BitFitSettings,
    DiffPruningSettings,
    BottleneckSettings,
    Ia3Settings,
    VeraSettings,
    DoraSettings,
    LoraSettings,
):
    """The settings of all methods. Python collects the fields of bases from the last to the first."""


CONFIGS: dict[str, MethodConfig] = {
    config.name: config for base in reversed(MethodSettings.__bases__) for config in vars(base)["configs"]
}
"""The methods by the name that `method` of an adapter's settings has, LoRA first."""
