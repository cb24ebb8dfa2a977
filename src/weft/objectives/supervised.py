"""Supervised fine-tuning: the mean cross entropy of the supervised tokens of a global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from weft.objectives.objective import Objective, Part


class Supervised(Objective):
    """Every row is one sample, and every supervised token counts the same."""

    name: ClassVar[str] = "supervised"
    example: ClassVar[Mapping[str, Any]] = {"prompt": "a", "completion": "b"}

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Every row that no other objective claims."""
        return True

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The row as it is."""
        return (Part(values),)

    def divisor(self, sample_weights: Sequence[float]) -> float:
        """The supervised tokens of the global batch."""
        return sum(sample_weights)
