"""Buckets are as even as any partition allows, and say how far they may be from that."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.fuse.buckets import balance


def partitions(num_things: int, num_buckets: int) -> Iterator[list[int]]:
    """Every way to fill exactly so many buckets, as the bucket of each thing."""

    def extend(places: list[int], used: int) -> Iterator[list[int]]:
        if len(places) == num_things:
            if used == num_buckets:
                yield places
            return
        for bucket in range(min(used + 1, num_buckets)):
            yield from extend([*places, bucket], max(used, bucket + 1))

    yield from extend([], 0)


def variance(weights: list[float], buckets: list[list[int]]) -> float:
    return statistics.pvariance([sum(weights[i] for i in bucket) for bucket in buckets])


def members(places: list[int], num_buckets: int) -> list[list[int]]:
    return [[i for i, place in enumerate(places) if place == b] for b in range(num_buckets)]


weights_lists = st.lists(st.integers(0, 60).map(float), min_size=1, max_size=7)


@settings(max_examples=80, deadline=None)
@given(weights_lists, st.data())
def test_balance_few_things_equals_brute_force(weights: list[float], data: st.DataObject) -> None:
    """Up to 12 things no partition into non-empty buckets is more even, and the bound says so."""
    num_buckets = data.draw(st.integers(1, len(weights)))
    result = balance(weights, num_buckets)
    least = min(variance(weights, members(p, num_buckets)) for p in partitions(len(weights), num_buckets))
    assert result.variance == pytest.approx(least, abs=1e-6)
    assert result.variance_bound == pytest.approx(least, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.data())
def test_balance_any_weights_fills_every_bucket_and_keeps_its_bound(weights: list[float], data: st.DataObject) -> None:
    """Each thing is in one bucket, none is empty, the variance is that of the buckets and not below the bound."""
    num_buckets = data.draw(st.integers(1, len(weights)))
    result = balance(weights, num_buckets)
    assert sorted(i for b in result.buckets for i in b) == list(range(len(weights)))
    assert len(result.buckets) == num_buckets and all(result.buckets)
    assert result.variance == pytest.approx(variance(weights, [list(b) for b in result.buckets]), abs=1e-4)
    assert 0 <= result.variance_bound <= result.variance


def test_balance_where_heaviest_first_fails_finds_the_even_split() -> None:
    """8 7 6 5 4 in two: heaviest first gives 17 and 13, the best is 15 and 15."""
    assert balance([8, 7, 6, 5, 4], 2).buckets == ((0, 1), (2, 3, 4))


def test_balance_where_moves_and_swaps_fail_searches_on() -> None:
    """Loads of 55 in three: moves and swaps stall at 17 19 19; the search finds 18 18 19."""
    weights = [4.0, 3.0, 7.0, 10.0, 12.0, 5.0, 9.0, 5.0]
    loads = sorted(sum(weights[i] for i in bucket) for bucket in balance(weights, 3).buckets)
    assert loads == [18.0, 18.0, 19.0]


def test_balance_things_of_no_weight_leave_no_bucket_empty() -> None:
    """Three things of no weight in three buckets are one each."""
    assert balance([0.0, 0.0, 0.0], 3).buckets == ((0,), (1,), (2,))


def test_balance_many_equal_things_is_proven_without_search() -> None:
    """40 equal things in 8 buckets: variance and bound are 0; one giant makes a bound above 0 that is met."""
    assert balance([1.0] * 40, 8).variance == 0
    giant = balance([100.0, *[1.0] * 30], 4)
    assert giant.variance > 0 and giant.variance == pytest.approx(giant.variance_bound)


@pytest.mark.parametrize(("weights", "num_buckets"), [([1.0], 0), ([1.0], 2), ([-1.0, 2.0], 1)])
def test_balance_bad_input_raises_plan_error(weights: list[float], num_buckets: int) -> None:
    """More buckets than things, none, or a negative weight."""
    with pytest.raises(PlanError):
        balance(weights, num_buckets)
