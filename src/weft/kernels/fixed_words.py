"""Sums in fixed point that a kernel adds to number by number, on whatever device; `fixed_point.py` has the arithmetic.

A sum is two int64 words, fine · 2⁻⁶⁰ + coarse · 2⁻¹⁷. Small numbers go to fine alone, and coarse is not even read:
almost always that is all there is. Where a number is not small, or a sum comes to 4, whole units of coarse are carried
over, and the buffer is marked as spilled. Whatever was carried when, the total depends on the exact sum alone,
and on no order.

A number that is not finite, or of 2³⁰ (1e9) or more, makes its sum NaN for good: coarse then holds a value that no sum
of fewer than 2¹⁵ other numbers can reach. That depends on no order either.

Shape suffix: P numbers, with any shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.kernels.fixed_point import CARRY_BITS, COARSE_BITS, FINE_BITS, LARGEST_FINE, REFUSED, rounded
from weft.kernels.launch import cdiv, jit, runs_triton, tl

LARGEST = 2.0**30
"""Numbers from here on are refused; coarse is `REFUSED` then."""
BLOCK = 2048
"""Sums of one program."""


@dataclass(frozen=True, eq=False)
class Words:
    """Sums in the form that kernels add to."""

    fine_P: torch.Tensor
    coarse_P: torch.Tensor
    spilled_1: torch.Tensor
    """int64, above 0 once coarse of a sum in the buffer may be nonzero."""

    @staticmethod
    def of_nothing(like_P: torch.Tensor) -> Words:
        """Empty sums, one for each number."""
        fine_P, coarse_P = (torch.zeros(like_P.shape, dtype=torch.int64, device=like_P.device) for _ in range(2))
        return Words(fine_P, coarse_P, torch.zeros(1, dtype=torch.int64, device=like_P.device))

    def part(self, start: int, shape: Sequence[int]) -> Words:
        """Some of the sums of a flat buffer, from an index on."""
        end = start + math.prod(shape)
        return Words(self.fine_P[start:end].view(*shape), self.coarse_P[start:end].view(*shape), self.spilled_1)

    def forget(self) -> None:
        for words in (self.fine_P, self.coarse_P, self.spilled_1):
            words.zero_()

    @property
    def addresses(self) -> tuple[int, int, int]:
        return self.fine_P.data_ptr(), self.coarse_P.data_ptr(), self.spilled_1.data_ptr()


def add_to_words(words: Words, values_P: torch.Tensor) -> None:
    """Adds one fp32 number to each sum, however small it is; the reference implementation of `add_number`."""
    fine_P, coarse_P = words.fine_P, words.coarse_P
    bad_P = ~(values_P.abs() < LARGEST) | (coarse_P == REFUSED)
    values_P = values_P.masked_fill(bad_P, 0.0)
    whole_P = (values_P * 2.0**COARSE_BITS).round_().masked_fill_(values_P.abs() < LARGEST_FINE, 0.0)
    rest_P = values_P - whole_P * 2.0**-COARSE_BITS
    fine_P += (rest_P * 2.0**FINE_BITS).round_().to(torch.int64)
    carried_P = (fine_P + 2 ** (CARRY_BITS - 1)) >> CARRY_BITS
    fine_P -= carried_P << CARRY_BITS
    coarse_P += whole_P.to(torch.int64) + carried_P
    coarse_P.masked_fill_(bad_P, REFUSED)
    words.spilled_1.fill_(1)


def total_of_words(words: Words) -> torch.Tensor:
    refused_P = words.coarse_P == REFUSED
    total_P = rounded(words.fine_P, words.coarse_P.masked_fill(refused_P, 0))
    return total_P.masked_fill_(refused_P, math.nan)


def collect(words: Words, grad_P: torch.Tensor) -> None:
    """Adds the sums to a gradient, each rounded once, and clears them."""
    (collect_kernel if runs_triton(grad_P) else collect_reference)(words, grad_P)


def collect_reference(words: Words, grad_P: torch.Tensor) -> None:
    grad_P.add_(total_of_words(words))
    words.forget()


def collect_kernel(words: Words, grad_P: torch.Tensor) -> None:
    """The kernel; a coarse word that nothing was carried into is neither read nor written."""
    _collect[(cdiv(grad_P.numel(), BLOCK),)](
        words.fine_P, words.coarse_P, words.spilled_1, grad_P, grad_P.numel(), BLOCK, num_warps=8
    )
    words.spilled_1.zero_()


@jit
def _nearest(value):  # type: ignore[no-untyped-def]
    """To the nearest whole number, halves to even; from 2²³ on all are whole.

    With 2²³ of the same sign a smaller one comes to where fp32 has whole numbers alone.
    """
    border = tl.where(value < 0.0, -8388608.0, 8388608.0)
    return tl.where(tl.abs(value) < 8388608.0, (value + border) - border, value)


@jit
def add_number(fine, coarse, value):  # type: ignore[no-untyped-def]
    """The words of a sum after one more fp32 number."""
    is_bad = (coarse == 9223372036854775807) | (tl.abs(value) >= 1073741824.0) | (value != value)
    value = tl.where(is_bad, 0.0, value)
    whole = tl.where(tl.abs(value) < 2.0, 0.0, _nearest(value * 131072.0))
    rest = value - whole * 0.00000762939453125
    fine += _nearest(rest * 1152921504606846976.0).to(tl.int64)
    carried = (fine + 4398046511104) >> 43
    fine -= carried << 43
    coarse = tl.where(is_bad, 9223372036854775807, coarse + whole.to(tl.int64) + carried)
    return fine, coarse


@jit
def add_small(fine, is_large, value, limit):  # type: ignore[no-untyped-def]
    """The fine word after one more fp32 number, and whether a number so far reached a limit: then fine is void."""
    is_small = tl.abs(value) < limit
    units = _nearest(tl.where(is_small, value, 0.0) * 1152921504606846976.0)
    return fine + units.to(tl.int64), is_large | ~is_small


@jit
def small_limit(num_addends):  # type: ignore[no-untyped-def]
    """Limit below which so many numbers sum to less than 2: a sum of less than 4 has room for them in fine."""
    return 2.0 / num_addends


@jit
def is_spilling(fine, is_large, mask):  # type: ignore[no-untyped-def]
    """True if any of some sums is void, or has reached 4."""
    is_spilled = (is_large | (fine >= 4611686018427387904) | (fine < -4611686018427387904)) & mask
    return tl.max(tl.max(is_spilled.to(tl.int32), axis=1), axis=0) > 0


@jit
def _collect(fine, coarse, spilled, grad, num_numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    indices = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = indices < num_numbers
    rest = tl.load(fine + indices, mask=mask, other=0)
    carried = (rest + 4398046511104) >> 43
    rest -= carried << 43
    is_refused = carried != carried
    if tl.load(spilled) != 0:
        more = tl.load(coarse + indices, mask=mask, other=0)
        is_refused = more == 9223372036854775807
        carried += tl.where(is_refused, 0, more)
        # What one thread loads another may store.
        tl.debug_barrier()
        tl.store(coarse + indices, tl.zeros((BLOCK,), dtype=tl.int64), mask=mask)
    # Both products are exact: the sum is rounded once to fp64, as in the reference implementation.
    total = carried.to(tl.float64) * 0.00000762939453125 + rest.to(tl.float64) * 8.673617379884035e-19
    total = tl.where(is_refused, float("nan"), total.to(tl.float32))
    tl.store(grad + indices, tl.load(grad + indices, mask=mask, other=0.0) + total, mask=mask)
    tl.debug_barrier()
    tl.store(fine + indices, tl.zeros((BLOCK,), dtype=tl.int64), mask=mask)
