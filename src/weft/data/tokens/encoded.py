"""The result of tokenising a text: its tokens and their weights in the loss."""

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
    """Weight of each; None if a token reaches from outside into a trained span."""

    def is_same(self, other: Encoded) -> bool:
        one, two = self.weights, other.weights
        is_weighted_alike = one is two if one is None or two is None else np.array_equal(one, two)
        return is_weighted_alike and np.array_equal(self.tokens, other.tokens)


def packed(ids: list[int]) -> Ids:
    """A list of numbers as an array, several times as fast as numpy makes one."""
    return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), np.int32)


def spread(spans: Iterable[tuple[int, int, float]], num_tokens: int) -> Weights:
    """Weights of tokens from spans [first, end) with a weight each; other tokens have weight 0."""
    weights = np.zeros(num_tokens)
    for first, end, weight in spans:
        weights[first:end] = weight
    return weights
