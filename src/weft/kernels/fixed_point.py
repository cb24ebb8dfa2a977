"""Sums of fp32 numbers that do not depend on the order of adding: each number becomes a whole multiple of one unit.

    v = round(g / u),  u = 2⁻⁶⁰;      sum = Σ v, which is exact;      the result is u · sum, rounded to fp32 once

The unit is the same for every job, step and tensor, so it depends on no layout, cut or neighbour. Numbers from 2⁻³⁷
(7e-12) on are multiples of it already and lose nothing; smaller ones are rounded by at most 2⁻⁶¹ each. A sum in fp32
rounds every time: of three and more numbers of about 1e-10, or larger ones, it is the less exact of the two.

`FixedPointSum` adds whole tensors. A sum is held in one or two int64 words, fine · u + coarse · c with c = 2⁻¹⁷. Almost
always fine is enough. The second word is used when a number of 2 or more comes, or when fine might overflow: whole
units of c are then carried over, which changes nothing about the sum. Whenever carries happen, `total` is a function of
the exact sum alone. The absolute values of the largest numbers added are added up as well. Where that reaches 2⁴⁵
(3.5e13), or a number was not finite, the total is NaN: a sum is refused, never wrapped. That depends on no order
either. Sums of several devices are added in the same words (`SumWords`, `total_of_all`): the total of all is that of
one device that had every number.

`Words` are sums in the same two words that a kernel adds to number by number. Small numbers go to fine alone, and
coarse is not even read. Where a number is not small, or a sum comes to 4, whole units of coarse are carried over, and
the buffer is marked as spilled. A number that is not finite, or of 2³⁰ (1e9) or more, makes its sum NaN for good:
coarse then holds a value that no sum of fewer than 2¹⁵ other numbers can reach.

`python -m benchmarks free-sums` measures the cost. Shape suffix: P numbers, with any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from weft.kernels.launch import cdiv, jit, runs_triton, tl

FINE_BITS, COARSE_BITS = 60, 17
"""Units are 2 to the minus of these."""
CARRY_BITS = FINE_BITS - COARSE_BITS
LARGEST_FINE = 2.0
"""Numbers from here on are split between both words."""
ROOM = 2**62
"""Largest value of either word, in its units."""
CHUNK = 2**16
"""Numbers converted at once, so that intermediate values stay in a processor's cache."""
REFUSED = 2**63 - 1
"""Value of a kernel's word instead of a sum once a number was too large."""
TOO_LARGE = ROOM << CARRY_BITS
"""Units from which on a sum is refused."""


@dataclass(frozen=True)
class SumWords:
    fine_P: torch.Tensor
    coarse_P: torch.Tensor | None
    """None if fine is enough for all of them."""
    sizes: tuple[int, ...]
    units: tuple[int, ...]
    """Upper bound of what was added, for each tensor; `TOO_LARGE` where it is refused."""

    def with_words(self, fine_P: torch.Tensor, coarse_P: torch.Tensor) -> SumWords:
        """The same tensors with sums that kernels have made (`Words`)."""
        refused = [bool((words == REFUSED).any()) for words in coarse_P.split(self.sizes)]
        return replace(
            self, fine_P=fine_P, coarse_P=coarse_P, units=tuple(TOO_LARGE if each else 0 for each in refused)
        )

    @staticmethod
    def joined(parts: Sequence[SumWords]) -> SumWords:
        coarse = None
        if any(part.coarse_P is not None for part in parts):
            coarse = torch.cat(
                [torch.zeros_like(part.fine_P) if part.coarse_P is None else part.coarse_P for part in parts]
            )
        return SumWords(
            torch.cat([part.fine_P for part in parts]),
            coarse,
            tuple(size for part in parts for size in part.sizes),
            tuple(units for part in parts for units in part.units),
        )


def added_up(words: SumWords, add_up: Callable[[torch.Tensor], torch.Tensor]) -> SumWords:
    """The sum over several devices that have sums of the same tensors; `add_up`: adds tensors over them, in order."""
    carried_P = _carried(words.fine_P)
    coarse_P = carried_P if words.coarse_P is None else carried_P + words.coarse_P
    units = add_up(torch.tensor([float(own) for own in words.units], dtype=torch.float64, device=carried_P.device))
    return SumWords(
        add_up(words.fine_P - (carried_P << CARRY_BITS)), add_up(coarse_P), words.sizes, tuple(map(int, units.tolist()))
    )


def total_of_all(parts: Sequence[SumWords]) -> torch.Tensor:
    """The sum (P) in fp32 of sums of the same tensors: the result of one `FixedPointSum` of all numbers."""
    first = parts[0]
    rest_P, coarse_P = torch.zeros_like(first.fine_P), torch.zeros_like(first.fine_P)
    for part in parts:
        carried_P = _carried(part.fine_P)
        rest_P += part.fine_P - (carried_P << CARRY_BITS)
        coarse_P += carried_P
        if part.coarse_P is not None:
            coarse_P += part.coarse_P
    total_P = rounded(rest_P, coarse_P)
    is_wrong = [sum(units) >= TOO_LARGE for units in zip(*(part.units for part in parts), strict=True)]
    for total, wrong in zip(total_P.split(first.sizes), is_wrong, strict=True):
        if wrong:
            total.fill_(math.nan)
    return total_P


def total_of_ends(parts: Sequence[SumWords], size: int) -> torch.Tensor:
    """The same for tensors of this size together. Rows at both ends of a model have two sums, one after the other
    however it is divided."""
    first_P, *tied = total_of_all(parts).split(size)
    total_P: torch.Tensor = first_P + tied[0] if tied else first_P
    return total_P


class FixedPointSum:
    """An order-independent sum of what a buffer holds at each call of `take`."""

    def __init__(self, values: torch.Tensor) -> None:
        """`values`: a contiguous fp32 buffer, which others add to between two calls."""
        self._values_P = values.view(-1)
        self._coarse_P: torch.Tensor | None = None
        self._in_fine = 0
        """Upper bound of fine, in units."""
        self._in_all = 0
        """Upper bound of all that was added, in units, whether carried or not."""
        self._is_finite = True

    @cached_property
    def _fine_P(self) -> torch.Tensor:
        """The low int64 word of each sum. Allocated on first use, so not at all if kernels sum into `Words`."""
        return torch.zeros_like(self._values_P, dtype=torch.int64)

    def take(self) -> None:
        """Adds the buffer's values to the sum, and sets the buffer to zero."""
        # A NaN is both the least and the largest.
        largest = max(abs(float(end)) for end in self._values_P.aminmax()) if len(self._values_P) else 0.0
        if largest == 0:
            return
        units = math.ceil(largest * 2**FINE_BITS) if math.isfinite(largest) else TOO_LARGE
        self._in_all += units
        self._is_finite &= self._in_all < TOO_LARGE
        if not self._is_finite:
            self._values_P.zero_()
            return
        if largest >= LARGEST_FINE:
            self._take_coarse()
            units = 2 ** (CARRY_BITS - 1)
        if self._in_fine + units > ROOM:
            self._carry()
        self._in_fine += units
        for values, fine in zip(self._values_P.split(CHUNK), self._fine_P.split(CHUNK), strict=True):
            # All three are exact but the rounding: the factor is a power of two.
            fine.add_(values.mul_(2.0**FINE_BITS).round_().to(torch.int64))
            values.zero_()

    def total(self) -> torch.Tensor:
        """The sum (P) in fp32, all NaN if something was not finite or too large."""
        if not self._is_finite:
            return torch.full_like(self._values_P, math.nan)
        return rounded(self._fine_P, self._coarse_P)

    @property
    def is_empty(self) -> bool:
        return self._in_all == 0

    def words(self) -> SumWords:
        """The sum so far, to be added to those of other devices; read it before the next number comes."""
        units = min(self._in_all, TOO_LARGE)
        return SumWords(self._fine_P, self._coarse_P, (len(self._fine_P),), (units,))

    def forget(self) -> None:
        """Starts again from zero; the buffer is emptied by its owner."""
        if not self.is_empty:
            self._fine_P.zero_()
        self._coarse_P = None
        self._in_fine = self._in_all = 0
        self._is_finite = True

    def _take_coarse(self) -> None:
        """Adds all but the last bits of what the buffer holds to coarse; less than half of its unit stays there."""
        coarse_P = self._second_word()
        whole_P = self._values_P.mul(2.0**COARSE_BITS).round_()
        coarse_P.add_(whole_P.to(torch.int64))
        self._values_P.sub_(whole_P.mul_(2.0**-COARSE_BITS))

    def _carry(self) -> None:
        carried_P = _carried(self._fine_P)
        self._second_word().add_(carried_P)
        self._fine_P.sub_(carried_P.bitwise_left_shift_(CARRY_BITS))
        self._in_fine = 2 ** (CARRY_BITS - 1)

    def _second_word(self) -> torch.Tensor:
        if self._coarse_P is None:
            self._coarse_P = torch.zeros_like(self._fine_P)
        return self._coarse_P


def rounded(fine_P: torch.Tensor, coarse_P: torch.Tensor | None) -> torch.Tensor:
    """The number that both words stand for, rounded once, independent of how it is split between them."""
    carried_P = _carried(fine_P)
    rest_P = fine_P - (carried_P << CARRY_BITS)
    if coarse_P is not None:
        carried_P += coarse_P
    return (carried_P.double() * 2.0**-COARSE_BITS + rest_P.double() * 2.0**-FINE_BITS).float()


def _carried(fine_P: torch.Tensor) -> torch.Tensor:
    carried_P: torch.Tensor = (fine_P + 2 ** (CARRY_BITS - 1)) >> CARRY_BITS
    return carried_P


LARGEST = 2.0**30
"""Numbers from here on are refused; coarse is `REFUSED` then."""
BLOCK = 2048


@dataclass(frozen=True, eq=False)
class Words:
    fine_P: torch.Tensor
    coarse_P: torch.Tensor
    spilled_1: torch.Tensor
    """int64, above 0 once coarse of a sum in the buffer may be nonzero."""

    @staticmethod
    def of_nothing(like_P: torch.Tensor) -> Words:
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
    """To the nearest whole number, halves to even; from 2²³ on all are whole. With 2²³ of the same sign a smaller one
    comes to where fp32 has whole numbers alone."""
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
