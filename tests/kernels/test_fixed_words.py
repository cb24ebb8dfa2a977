"""Words that kernels add to: reference, kernels and the sums of `fixed_point` agree to the bit, in any order."""

from __future__ import annotations

import math

import pytest
import torch
from test_fixed_point import drawn, in_order, summed

from weft.kernels.fixed_point import (
    BLOCK,
    Words,
    add_number,
    add_small,
    add_to_words,
    collect_kernel,
    collect_reference,
    is_spilling,
    small_limit,
    total_of_words,
)
from weft.kernels.launch import jit, tl

SIZES = [1e-12, 1e-6, 0.7, 3e3, 1e8]


@jit
def _add_all(fine_ptr, coarse_ptr, values, num_addends, num_numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    here = tl.arange(0, BLOCK)
    mask = here < num_numbers
    fine, coarse = tl.load(fine_ptr + here, mask=mask, other=0), tl.load(coarse_ptr + here, mask=mask, other=0)
    for addend in range(0, num_addends):
        value = tl.load(values + addend * num_numbers + here, mask=mask, other=0.0)
        fine, coarse = add_number(fine, coarse, value)
    tl.store(fine_ptr + here, fine, mask=mask)
    tl.store(coarse_ptr + here, coarse, mask=mask)


@jit
def _add_small(fine_ptr, spills_ptr, values, num_addends, num_numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    here = tl.arange(0, BLOCK)[:, None] + tl.arange(0, 1)[None, :]
    mask = here < num_numbers
    fine = tl.load(fine_ptr + here, mask=mask, other=0)
    is_large, limit = fine != fine, small_limit(num_addends)
    for addend in range(0, num_addends):
        value = tl.load(values + addend * num_numbers + here, mask=mask, other=float("nan"))
        fine, is_large = add_small(fine, is_large, value, limit)
    tl.store(fine_ptr + here, fine, mask=mask)
    tl.store(spills_ptr, is_spilling(fine, is_large, mask).to(tl.int64))


def added(addends: torch.Tensor) -> Words:
    words = Words.of_nothing(addends[0])
    for addend in addends:
        add_to_words(words, addend)
    return words


def small(addends: torch.Tensor, words: Words) -> bool:
    """Adds small numbers with the kernel; whether it reported that they are not."""
    spills = torch.zeros(1, dtype=torch.int64)
    _add_small[(1,)](words.fine_P, spills, addends.contiguous(), len(addends), len(addends[0]), 64)
    return bool(spills)


@pytest.mark.parametrize("size", SIZES)
def test_words_when_addends_are_permuted_then_the_total_is_that_of_fixed_point(size):
    addends = drawn(40, size, 30) * drawn(40, 1.0, 1, seed=4)
    found = total_of_words(added(addends))
    assert found.equal(summed(addends))
    for seed in range(3):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        assert total_of_words(added(addends[order])).equal(found)
    exact = addends.double().sum(dim=0)
    free, ordered = ((total.double() - exact).abs() for total in (found, in_order(addends)))
    if size > 1e-10:
        assert free.mean() < ordered.mean() and free.max() <= ordered.max()


def test_kernel_when_numbers_are_of_all_sizes_then_its_words_are_the_references():
    addends = torch.cat([drawn(3, size, 50, seed=seed) for seed, size in enumerate(SIZES)])
    # Halves of a unit, and the borders of the words.
    addends[0, :6] = torch.tensor([1.5, 2.5, -0.5, -3.5, 0.5, 7.0]) * 2.0**-60
    addends[1, :6] = torch.tensor([2.0, -2.0, 2.0 - 2.0**-23, 2.0**29, -(2.0**29), 2.0**-37])
    addends[2, 6:9] = torch.tensor([math.nan, math.inf, -(2.0**30)])
    # Halves between whole numbers of 23 bits, of both words and signs.
    halves = torch.tensor([5000000.5, 5000001.5, -5000000.5, -5000001.5, 4194304.5, -8388607.5])
    addends[3, 10:16], addends[3, 16:22] = halves * 2.0**-17, halves * 2.0**-60
    words, reference = Words.of_nothing(addends[0]), added(addends)
    _add_all[(1,)](words.fine_P, words.coarse_P, addends.contiguous(), len(addends), 50, 64)
    assert words.fine_P.equal(reference.fine_P) and words.coarse_P.equal(reference.coarse_P)
    assert total_of_words(words)[6:9].isnan().all() and total_of_words(words)[:6].isfinite().all()


def test_kernel_when_all_numbers_are_small_then_coarse_is_not_needed_and_the_total_is_the_same():
    addends = torch.cat([drawn(80, size, 50, seed=seed) for seed, size in enumerate((1e-12, 1e-6, 1e-3))])
    addends[0, :6] = torch.tensor([1.5, 2.5, -0.5, -3.5, 0.5, 7.0]) * 2.0**-60
    addends[:, 7] = 2.0 / 240 - 2.0**-30
    words = Words.of_nothing(addends[0])
    assert not small(addends, words)
    assert not words.coarse_P.any() and total_of_words(words).equal(summed(addends))
    # A sum of nearly 2 has room for as much again, and then no more.
    assert not small(addends, words)
    assert words.fine_P[7] < 2**62 < words.fine_P[7] + 2**40 and small(addends, words)


@pytest.mark.parametrize("value", [0.4, -1.0, 3e7, math.inf, math.nan])
def test_kernel_when_one_number_is_not_small_then_reports_it(value):
    addends = torch.zeros(5, 50)
    assert not small(addends, Words.of_nothing(addends[0]))
    addends[2, 49] = value
    assert small(addends, Words.of_nothing(addends[0]))


@pytest.mark.parametrize("size", [1e-6, 3e3])
def test_collect_when_words_hold_sums_then_adds_them_once_and_leaves_nothing(size):
    """The kernel as the reference; what was not spilled has an unused coarse part."""
    addends = drawn(40, size, BLOCK + 70)
    addends[3, 5] = math.nan
    for collect in (collect_reference, collect_kernel):
        words, grad_P = added(addends), torch.ones(BLOCK + 70)
        collect(words, grad_P)
        assert grad_P[5].isnan()
        grad_P[5] = addends[0, 5] = 0.0
        expected = 1 + summed(addends.nan_to_num())
        expected[5] = 0.0
        assert grad_P.equal(expected)
        assert not words.fine_P.any() and not words.coarse_P.any()
    words = Words.of_nothing(addends[0])
    assert not small(addends[:1, :50] * 1e-9, words.part(0, (50,)))
    words.coarse_P.fill_(1)
    grad_P.zero_()
    collect_kernel(words, grad_P)
    assert grad_P[:50].any() and grad_P[:50].equal(summed(addends[:1, :50] * 1e-9))
