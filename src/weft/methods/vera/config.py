"""VeRA's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.methods.config import MethodConfig
from weft.settings import at_least, setting


class VeraConfig(MethodConfig):
    name = "vera"
    auto_targets = "all-linear"
    learning_rate = 5e-3
    rank_setting = "vera_rank"
    undivided = None


@dataclass(frozen=True)
class VeraSettings:
    configs: ClassVar[tuple[MethodConfig, ...]] = (VeraConfig(),)

    vera_rank: int = setting(256, rule=at_least(1), methods=("vera",))
    """Rank of VeRA's shared matrices (PEFT's `r`): each module trains this many numbers and one per output."""
    projection_prng_key: int = setting(0, rule=at_least(0), methods=("vera",))
    """Seed of VeRA's shared matrices; the same key gives the same matrices as in PEFT."""
    save_projection: bool = setting(True, methods=("vera",))
    """Write the shared matrices into the adapter's file as well."""
    d_initial: float = setting(0.1, methods=("vera",))
    """Initial value of VeRA's scales of the rank; those of the outputs start at zero."""
