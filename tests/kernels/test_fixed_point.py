"""Sums in fixed point: one result for every order, no less exact than fp32 in order, and never wrapped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import pytest
import torch

from weft.kernels.fixed_point import CHUNK, FixedPointSum, SumWords, total_of_all


def summed(addends: Iterable[torch.Tensor]) -> torch.Tensor:
    addends = list(addends)
    buffer = torch.zeros_like(addends[0])
    sums = FixedPointSum(buffer)
    for addend in addends:
        buffer.add_(addend)
        sums.take()
        assert not buffer.any(), "what was taken is gone"
    return sums.total()


def in_order(addends: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(addends[0])
    for addend in addends:
        found.add_(addend)
    return found


def drawn(num_addends: int, size: float, num_numbers: int = 500, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_addends, num_numbers, generator=generator) * size


@pytest.mark.parametrize("num_addends", [1, 2, 4, 8, 64, 512])
@pytest.mark.parametrize("size", [10.0**exponent for exponent in range(-10, 5)])
def test_sum_when_compared_with_fp64_then_errs_no_more_than_fp32_in_order(size, num_addends):
    addends = drawn(num_addends, size)
    exact = addends.double().sum(dim=0)
    free, ordered = ((found.double() - exact).abs() for found in (summed(addends), in_order(addends)))
    if num_addends > 2:
        assert free.mean() < ordered.mean() and free.max() <= ordered.max()
    else:
        # One or two numbers are rounded once in fp32 too, and not to a unit before.
        assert (free <= ordered + num_addends * 2.0**-61).all()


@pytest.mark.parametrize("size", [1e-14, 1e-12, 1e-10, 1e-4, 1e4])
def test_sum_when_it_is_of_one_number_then_loses_at_most_half_a_unit_and_from_7e_12_on_nothing(size):
    (numbers,) = drawn(1, size)
    lost = (summed([numbers]) - numbers).abs()
    assert lost.max() <= 2.0**-61 and not lost[numbers.abs() >= 2.0**-37].any()


def test_sum_when_numbers_are_of_all_sizes_then_is_the_exact_one_rounded_once():
    """Whole words, carries and large numbers beside small ones: checked against whole-number arithmetic."""
    sizes = torch.logspace(-11, 12, 60)
    addends = drawn(60, 1.0, 40) * sizes[:, None]
    addends = addends[torch.randperm(60, generator=torch.Generator().manual_seed(1))]
    for column, found in zip(addends.T.tolist(), summed(addends).tolist(), strict=True):
        exact = sum(Fraction(round(Fraction(x) * 2**60), 2**60) for x in column)
        assert found == pytest.approx(float(exact), rel=2.0**-24, abs=0)


@pytest.mark.parametrize("largest", [1e-3, 0.9, 1.9, 3e7])
def test_sum_when_addends_are_permuted_then_has_the_same_bits(largest):
    """0.9 and 1.9 fill the first word again and again, each time somewhere else."""
    addends = drawn(300, 1.0, 50).clamp(-3, 3) * drawn(300, 1.0, 1, seed=4).clamp(-3, 3) * (largest / 9)
    found = summed(addends)
    differing = 0
    for seed in range(5):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        assert summed(addends[order]).equal(found)
        differing += not in_order(addends[order]).equal(in_order(addends))
    assert differing == 5, "sums in order do differ"


def test_sum_when_the_first_word_would_overflow_then_is_carried():
    assert summed(torch.full((40, 3), 1.5)).tolist() == [60.0] * 3
    assert summed(torch.tensor([[1.5], [-1.5]] * 50 + [[2.0**-40]])).tolist() == [2.0**-40]


def test_sum_when_the_buffer_is_longer_than_a_chunk_then_all_of_it_counts():
    values = torch.arange(2 * CHUNK + 3, dtype=torch.float32) / 2**20
    assert summed([values, values]).equal(2 * values)
    assert summed([torch.zeros(0)]).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e14, -3e38])
def test_sum_when_a_number_is_not_finite_or_too_large_then_is_nan_in_any_order_until_forgotten(bad):
    good, wrong = torch.tensor([1.0, 2.0]), torch.tensor([1.0, bad])
    for addends in ([good, wrong], [wrong, good], [good, wrong, good]):
        assert summed(addends).isnan().all()
    buffer = wrong.clone()
    sums = FixedPointSum(buffer)
    sums.take()
    sums.forget()
    buffer.copy_(good)
    sums.take()
    assert sums.total().equal(good)


def test_sum_when_many_large_numbers_would_pass_the_range_then_is_nan_even_if_they_cancel():
    """In another order the middle of the sum would have wrapped."""
    large = 2.0**44
    assert summed(torch.tensor([[large]])).tolist() == [large]
    assert summed(torch.tensor([[large], [-large], [large]])).isnan().all()
    assert summed(torch.tensor([[large], [large], [-large]])).isnan().all()


def words_of(addends: torch.Tensor) -> SumWords:
    """The sums of one device, in tensors of 20 numbers and the rest."""
    parts = []
    for own in (addends[:, :20], addends[:, 20:]):
        buffer = torch.zeros(own.shape[1])
        sums = FixedPointSum(buffer)
        for addend in own:
            buffer.add_(addend)
            sums.take()
        parts.append(sums.words())
    return SumWords.joined(parts)


@pytest.mark.parametrize("largest", [1e-3, 1.9, 3e7])
def test_sum_when_several_devices_have_parts_of_it_then_has_the_bits_of_one(largest):
    """Whichever has which, and whether or not they needed the second word."""
    addends = drawn(90, 1.0, 50).clamp(-3, 3) * drawn(90, 1.0, 1, seed=4).clamp(-3, 3) * (largest / 9)
    found = summed(addends)
    for sizes in ([90], [1, 89], [30, 30, 30], [0, 50, 40]):
        order = torch.randperm(90, generator=torch.Generator().manual_seed(len(sizes)))
        parts = [words_of(own) for own in addends[order].split(sizes)]
        assert total_of_all(parts).equal(found)


def test_sum_when_only_all_devices_together_pass_the_range_then_that_tensor_is_nan():
    large = torch.zeros(3, 50)
    large[:, 3] = torch.tensor([1.0, -1.0, 1.0]) * 2.0**44
    large[:, 30] = 1.0
    together = total_of_all([words_of(large[:1]), words_of(large[1:])])
    assert together[:20].isnan().all() and together[20:].equal(summed(large[:, 20:]))
    alone = total_of_all([words_of(large[:1]), words_of(torch.zeros(1, 50))])
    assert alone.equal(large[0])
