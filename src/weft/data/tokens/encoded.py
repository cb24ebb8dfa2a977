"""What tokenising a text gives: its tokens, and what each counts in the loss."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Weights: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The tokens of a text as a whole."""

    tokens: Ids
    weights: Weights | None
    """What each counts in the loss; None if one reaches from outside into a trained span."""

    def is_same(self, other: Encoded) -> bool:
        """Whether another one has the same tokens and weights."""
        one, two = self.weights, other.weights
        is_weighted_alike = one is two if one is None or two is None else np.array_equal(one, two)
        return is_weighted_alike and np.array_equal(self.tokens, other.tokens)


def packed(ids: list[int]) -> Ids:
    """A list of numbers as an array, several times as fast as numpy makes one."""
    return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), np.int32)


def spread(spans: Iterable[tuple[int, int, float]], num_tokens: int) -> Weights:
    """The weights of tokens: those from the first up to the second number of a span have its weight, others none."""
    weights = np.zeros(num_tokens)
    for first, end, weight in spans:
        weights[first:end] = weight
    return weights
