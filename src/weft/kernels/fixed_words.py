"""Sums in fixed point that a kernel adds to number by number, on whatever device; `fixed_point.py` has the arithmetic.

A sum is two int64 words, fine · 2⁻⁶⁰ + coarse · 2⁻¹⁷. After each number whole units of coarse are carried over, so that
fine stays within half of such a unit: the words themselves depend on the exact sum alone, and on no order.

A number that is not finite, or of 2³⁰ (1e9) or more, makes its sum NaN for good: coarse then holds a value that no sum
of fewer than 2¹⁵ other numbers can reach. That depends on no order either.

Shape suffix: P numbers, with any shape; their words have one more dimension of 2.
"""

from __future__ import annotations

import math

import torch

from weft.kernels.fixed_point import CARRY_BITS, COARSE_BITS, FINE_BITS, LARGEST_FINE, REFUSED
from weft.kernels.launch import jit, tl

LARGEST = 2.0**30
"""Numbers from here on are refused; coarse is `REFUSED` then."""


def new_words(like_P: torch.Tensor) -> torch.Tensor:
    """The words of sums of nothing."""
    return torch.zeros(*like_P.shape, 2, dtype=torch.int64, device=like_P.device)


def add_to_words(words_P2: torch.Tensor, values_P: torch.Tensor) -> None:
    """Adds one fp32 number to each sum; the plain torch twin of `add_number`."""
    fine_P, coarse_P = words_P2.unbind(-1)
    bad_P = ~(values_P.abs() < LARGEST) | (coarse_P == REFUSED)
    values_P = values_P.masked_fill(bad_P, 0.0)
    whole_P = (values_P * 2.0**COARSE_BITS).round_().masked_fill_(values_P.abs() < LARGEST_FINE, 0.0)
    rest_P = values_P - whole_P * 2.0**-COARSE_BITS
    fine_P += (rest_P * 2.0**FINE_BITS).round_().to(torch.int64)
    carried_P = (fine_P + 2 ** (CARRY_BITS - 1)) >> CARRY_BITS
    fine_P -= carried_P << CARRY_BITS
    coarse_P += whole_P.to(torch.int64) + carried_P
    coarse_P.masked_fill_(bad_P, REFUSED)


def total_of_words(words_P2: torch.Tensor) -> torch.Tensor:
    """The sums in fp32, each rounded once."""
    fine_P, coarse_P = words_P2.unbind(-1)
    total_P = (coarse_P.double() * 2.0**-COARSE_BITS + fine_P.double() * 2.0**-FINE_BITS).float()
    return total_P.masked_fill_(coarse_P == REFUSED, math.nan)


@jit
def _rounded(value):  # type: ignore[no-untyped-def]
    """To the nearest whole number, halves to even; from 2²³ on all are whole."""
    return tl.where(tl.abs(value) < 8388608.0, (value + 12582912.0) - 12582912.0, value)


@jit
def add_number(fine, coarse, value):  # type: ignore[no-untyped-def]
    """The words of a sum and of one more fp32 number."""
    is_bad = (coarse == 9223372036854775807) | (tl.abs(value) >= 1073741824.0) | (value != value)
    value = tl.where(is_bad, 0.0, value)
    whole = tl.where(tl.abs(value) < 2.0, 0.0, _rounded(value * 131072.0))
    rest = value - whole * 0.00000762939453125
    fine += _rounded(rest * 1152921504606846976.0).to(tl.int64)
    carried = (fine + 4398046511104) >> 43
    fine -= carried << 43
    coarse = tl.where(is_bad, 9223372036854775807, coarse + whole.to(tl.int64) + carried)
    return fine, coarse
