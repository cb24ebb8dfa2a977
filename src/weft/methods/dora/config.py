"""DoRA has LoRA's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft.methods.config import MethodConfig
from weft.methods.lora.config import LoraConfig, LoraSettings

if TYPE_CHECKING:
    from weft.spec.adapter import AdapterSpec


class DoraConfig(LoraConfig):
    name = "dora"
    is_served = False

    def smallest_side(self, spec: AdapterSpec) -> int:
        # The lengths of rows are a vector.
        return 1


@dataclass(frozen=True)
class DoraSettings(LoraSettings):
    """DoRA has LoRA's settings."""

    configs: ClassVar[tuple[MethodConfig, ...]] = (DoraConfig(),)
