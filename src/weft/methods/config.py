"""Facts about a method that need no torch: its name, its defaults and its capabilities.

A method's `config.py` has its settings, as a dataclass whose fields AdapterSpec inherits, and a `MethodConfig` for each
method that has them. What a config does not claim is refused in one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from weft.spec.adapter import AdapterSpec


class MethodConfig:
    """One method, as specs, planners and servers know it."""

    name: ClassVar[str]
    """Value of the setting `method`."""
    auto_targets: ClassVar[str]
    """Meaning of `target_modules: auto`."""
    learning_rate: ClassVar[float] = 2e-4
    """Peak learning rate of a job that states none: about a tenth of the best one on the tiny backbone
    (docs/methods.md), as LoRA's is of LoRA's."""
    rank_setting: ClassVar[str | None] = None
    """Name of the setting that is its rank, if it has one."""
    undivided: ClassVar[str | None] = "does not support layers that are divided over devices"
    """Why it cannot train layers that are divided over devices; None if it can."""
    is_served: ClassVar[bool] = False
    """Whether inference servers load its files as they are."""
    merges_into: ClassVar[str] = "its base"
    """What it can be merged into, where servers do not load it."""

    def targets(self, spec: AdapterSpec) -> str:
        """Value of `target_modules: auto` for these settings."""
        return self.auto_targets

    def check(self, spec: AdapterSpec) -> None:
        """ConfigError for settings that exclude each other."""

    def patterns(self, spec: AdapterSpec) -> Mapping[str, str | tuple[str, ...] | None]:
        """Settings that may be a regular expression, by name."""
        return {}

    def followed(self, spec: AdapterSpec) -> Mapping[str, Any]:
        """Settings whose defaults follow from others, with values."""
        return {}

    def num_leading_rows(self, spec: AdapterSpec) -> int:
        """Number of rows in front of every sample."""
        return 0

    def smallest_side(self, spec: AdapterSpec) -> int:
        """Lower bound of the smaller side of its matrices, as optimizers that factor moments count it."""
        return 1
