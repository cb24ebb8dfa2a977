"""Sample-weighted fine-tuning: Σ w · loss / Σ w over the supervised tokens of a global batch.

A row's weight stands in its `weight` column; messages of a chat may have their own. With all weights 1 this is
supervised fine-tuning, to the bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from weft.errors import DataError
from weft.objectives.objective import Part
from weft.objectives.supervised import Supervised
from weft.settings.fields import describe

COLUMN = "weight"


class Weighted(Supervised):
    """Every row is one sample, whose tokens count as much as its weight and its messages' weights say."""

    name: ClassVar[str] = "weighted"
    example: ClassVar[Mapping[str, Any]] = {**Supervised.example, "weight": 0.5}

    def claims(self, values: Mapping[str, Any]) -> bool:
        """A row with a weight, or with messages whose weights are not just 0 or 1."""
        if values.get(COLUMN) not in (None, ""):
            return True
        lists = [value for value in values.values() if isinstance(value, list)]
        messages = [item for value in lists for item in value if isinstance(item, Mapping)]
        return any(message.get(COLUMN) not in (None, 0, 1) for message in messages)

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The row with its weight; 1 where it has none."""
        given = values.get(COLUMN)
        if given is None or given == "":
            return (Part(values),)
        weight = given
        if isinstance(given, str):
            # The cells of a table are text.
            with contextlib.suppress(ValueError):
                weight = float(given)
        if isinstance(weight, bool | str) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DataError(
                f"{COLUMN} is {describe(given)}; expected a number from 0 up.",
                where=where,
                hint="To train on every row alike, set objective to supervised.",
            )
        return (Part(values, float(weight)),)
