"""Words that kernels add to: the twin, the kernel and the sums of `fixed_point` agree to the bit, in any order."""

from __future__ import annotations

import math

import pytest
import torch
from test_fixed_point import drawn, in_order, summed

from weft.kernels.fixed_words import add_number, add_to_words, new_words, total_of_words
from weft.kernels.launch import jit, tl

SIZES = [1e-12, 1e-6, 0.7, 3e3, 1e8]


@jit
def _add_all(words, values, num_addends, num_numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    here = tl.arange(0, BLOCK)
    mask = here < num_numbers
    fine, coarse = tl.load(words + here * 2, mask=mask, other=0), tl.load(words + here * 2 + 1, mask=mask, other=0)
    for addend in range(0, num_addends):
        value = tl.load(values + addend * num_numbers + here, mask=mask, other=0.0)
        fine, coarse = add_number(fine, coarse, value)
    tl.store(words + here * 2, fine, mask=mask)
    tl.store(words + here * 2 + 1, coarse, mask=mask)


def added(addends: torch.Tensor) -> torch.Tensor:
    words = new_words(addends[0])
    for addend in addends:
        add_to_words(words, addend)
    return words


@pytest.mark.parametrize("size", SIZES)
def test_words_when_addends_are_permuted_then_are_the_same_and_the_total_is_that_of_fixed_point(size):
    addends = drawn(40, size, 30) * drawn(40, 1.0, 1, seed=4)
    found = added(addends)
    assert total_of_words(found).equal(summed(addends))
    for seed in range(3):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        assert added(addends[order]).equal(found)
    exact = addends.double().sum(dim=0)
    free, ordered = ((total.double() - exact).abs() for total in (total_of_words(found), in_order(addends)))
    if size > 1e-10:
        assert free.mean() < ordered.mean() and free.max() <= ordered.max()


def test_kernel_when_numbers_are_of_all_sizes_then_its_words_are_the_twins():
    addends = torch.cat([drawn(3, size, 50, seed=place) for place, size in enumerate(SIZES)])
    # Halves of a unit, and the borders of the words.
    addends[0, :6] = torch.tensor([1.5, 2.5, -0.5, -3.5, 0.5, 7.0]) * 2.0**-60
    addends[1, :6] = torch.tensor([2.0, -2.0, 2.0 - 2.0**-23, 2.0**29, -(2.0**29), 2.0**-37])
    addends[2, 6:9] = torch.tensor([math.nan, math.inf, -(2.0**30)])
    words = new_words(addends[0])
    _add_all[(1,)](words, addends.contiguous(), len(addends), 50, 64)
    assert words.equal(added(addends))
    assert total_of_words(words)[6:9].isnan().all() and total_of_words(words)[:6].isfinite().all()
