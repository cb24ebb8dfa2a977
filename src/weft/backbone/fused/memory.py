"""What is kept between forward and backward, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "mlp", "full"]


@dataclass(frozen=True)
class Memory:
    """Trades time for memory; no choice changes a result."""

    recompute: Recompute = "none"
    """What is made again on the way back: cheap things only, also the widest product of a layer, or all of a layer."""
    offload: bool = False
    """Keep the rest in the machine's own memory instead of the GPU's."""
