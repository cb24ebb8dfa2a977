"""BitFit has no settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.methods.config import MethodConfig


class BitFitConfig(MethodConfig):
    name = "bitfit"
    auto_targets = "all-linear"
    learning_rate = 3e-3
    undivided = None
    merges_into = "its base, if that has biases"


@dataclass(frozen=True)
class BitFitSettings:
    """BitFit has no settings."""

    configs: ClassVar[tuple[MethodConfig, ...]] = (BitFitConfig(),)
