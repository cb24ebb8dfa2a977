"""The settings of bottleneck adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft.methods.config import MethodConfig
from weft.settings import above, at_least, setting

if TYPE_CHECKING:
    from weft.spec.adapter import AdapterSpec


class BottleneckConfig(MethodConfig):
    name = "bottleneck"
    auto_targets = "all-blocks"
    learning_rate = 5e-4
    undivided = None

    def targets(self, spec: AdapterSpec) -> str:
        return r".*\.(shared_)?mlp" if spec.bottleneck_variant == "pfeiffer" else self.auto_targets


@dataclass(frozen=True)
class BottleneckSettings:
    configs: ClassVar[tuple[MethodConfig, ...]] = (BottleneckConfig(),)

    bottleneck_size: int = setting(
        64, aliases=("adapter_size", "bottleneck_dim"), rule=at_least(1), methods=("bottleneck",)
    )
    """Width of the inner layer, at most the model's."""
    bottleneck_variant: str = setting("houlsby", choices=("houlsby", "pfeiffer"), methods=("bottleneck",))
    """Where `target_modules: auto` puts it: houlsby after every attention and MLP block, pfeiffer after the MLPs."""
    bottleneck_activation: str = setting(
        "silu", aliases=("non_linearity",), choices=("silu", "relu", "gelu", "tanh"), methods=("bottleneck",)
    )
    """Non-linearity of the inner layer."""
    bottleneck_scale: float = setting(1.0, aliases=("scaling",), rule=above(0), methods=("bottleneck",))
    """Factor on the adapter's output before it is added to the block's."""
