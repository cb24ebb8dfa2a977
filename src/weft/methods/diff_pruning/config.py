"""Diff pruning's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft.errors import ConfigError
from weft.methods.config import MethodConfig
from weft.settings import above, at_least, setting

if TYPE_CHECKING:
    from weft.spec.adapter import AdapterSpec


L0_WEIGHT = 1e-5


class DiffPruningConfig(MethodConfig):
    name = "diff_pruning"
    auto_targets = "all-linear"
    learning_rate = 5e-3
    undivided = "chooses among the numbers of whole weights"

    def check(self, spec: AdapterSpec) -> None:
        if spec.mask != "l0" and spec.l0_weight != L0_WEIGHT:
            raise ConfigError(f"is for mask l0; mask is {spec.mask}.", where="l0_weight")


@dataclass(frozen=True)
class DiffPruningSettings:
    configs: ClassVar[tuple[MethodConfig, ...]] = (DiffPruningConfig(),)

    density: float = setting(0.005, rule=above(0, 1), methods=("diff_pruning",))
    """Share of every adapted weight that may change: the numbers smallest in size."""
    mask: str = setting("magnitude", choices=("magnitude", "l0"), methods=("diff_pruning",))
    """magnitude: all of that share change; l0: a gate on each opens or closes during training, and only open ones are
    written."""
    l0_weight: float = setting(L0_WEIGHT, aliases=("sparsity_pen",), rule=at_least(0), methods=("diff_pruning",))
    """What an open gate adds to the loss: it stays open where it lowers the loss by more. For `mask: l0`."""
