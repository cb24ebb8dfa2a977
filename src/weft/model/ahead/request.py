"""What decides which kernels a run will launch, as plain data that goes to another process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.kernels.device import GpuKind

READY = b"ready\n"
"""What the process that compiles says when all that the first steps need is there."""


@dataclass(frozen=True)
class KernelRequest:
    """A backbone, the adapters on it, and the GPU."""

    config: Mapping[str, Any]
    """The model's config.json."""
    dtype: str
    """Of the weights, by torch's name."""
    quantize: str
    recompute: str
    tensor: int
    """Devices that share every layer."""
    ranks: tuple[int, ...]
    """The widest of each adapter, every one once."""
    drops: bool
    """Whether any adapter has dropout."""
    others: tuple[tuple[str, str], ...]
    """What other methods than LoRA change, and where; in order."""
    copies: tuple[tuple[str, int], ...]
    """Methods of adapters and the ranks that their kernels see, every pair once; in order."""
    num_jobs: int
    """Most that may step at a time."""
    lanes: tuple[int, ...]
    """How many groups of parameters adapters train; LoRA: 2."""
    gpu: GpuKind

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> KernelRequest:
        """What `to_json` wrote."""
        fields = json.loads(text)
        gpu = fields.pop("gpu")
        gpu = GpuKind(**{**gpu, "capability": tuple(gpu["capability"])})
        pairs = {name: tuple((first, second) for first, second in fields[name]) for name in ("others", "copies")}
        return KernelRequest(**{**fields, **_tuples(fields, "ranks", "lanes"), **pairs, "gpu": gpu})


def _tuples(fields: Mapping[str, Any], *names: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(fields[name]) for name in names}
