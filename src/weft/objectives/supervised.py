"""Supervised fine-tuning: the mean cross entropy of the supervised tokens of a global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from weft.errors import DataError
from weft.objectives.objective import Objective, Part
from weft.settings import LARGEST, describe, is_usable_number


class Supervised(Objective):
    """Every row is one sample, and all supervised tokens have the same weight."""

    name: ClassVar[str] = "supervised"
    example: ClassVar[Mapping[str, Any]] = {"prompt": "a", "completion": "b"}

    def claims(self, values: Mapping[str, Any]) -> bool:
        return True

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        return (Part(values),)

    def divisor(self, sample_weights: Sequence[float]) -> float:
        return sum(sample_weights)


COLUMN = "weight"


class Weighted(Supervised):
    """Every row is one sample, with the weights of the row and of its messages."""

    name: ClassVar[str] = "weighted"
    example: ClassVar[Mapping[str, Any]] = {**Supervised.example, "weight": 0.5}

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Whether a row has a weight, or messages with weights other than 0 and 1."""
        if values.get(COLUMN) not in (None, ""):
            return True
        lists = [value for value in values.values() if isinstance(value, list)]
        messages = [item for value in lists for item in value if isinstance(item, Mapping)]
        return any(message.get(COLUMN) not in (None, 0, 1) for message in messages)

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        given = values.get(COLUMN)
        if given is None or given == "":
            return (Part(values),)
        weight = given
        if isinstance(given, str):
            # The cells of a table are text.
            with contextlib.suppress(ValueError):
                weight = float(given)
        if not is_usable_number(weight) or weight < 0:
            raise DataError(
                f"{COLUMN} is {describe(given)}; expected a number from 0 to {LARGEST:.0e}.",
                where=where,
                hint="To train on every row alike, set objective to supervised.",
            )
        return (Part(values, float(weight)),)
