"""Supervised fine-tuning: the mean cross entropy of the supervised tokens of a global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from weft.objectives.objective import Part

if TYPE_CHECKING:
    from weft.spec import JobSpec


class Supervised:
    """Every row is one sample, and every supervised token counts the same."""

    name: ClassVar[str] = "supervised"
    group_size: ClassVar[int] = 1
    part_format: ClassVar[str | None] = None
    reads_reference: ClassVar[bool] = False

    def of_job(self, job: JobSpec) -> Supervised:
        """It has no settings."""
        return self

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Every row that no other objective claims."""
        return True

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The row as it is."""
        return (Part(values),)

    def divisor(self, sample_weights: Sequence[float]) -> float:
        """The supervised tokens of the global batch."""
        return sum(sample_weights)
