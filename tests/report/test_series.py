import math

import pytest

from weft.report.figure import in_chunks, rate_in_bins, rounded, smooth, thin


def test_smooth_when_the_curve_is_flat_then_it_stays_flat() -> None:
    assert [y for _, y in smooth([(x, 3.0) for x in range(40)], 8)] == pytest.approx([3.0] * 40)


def test_smooth_when_the_curve_falls_then_it_does_not_lag_behind() -> None:
    line = smooth([(x, 100.0 - x) for x in range(100)], 10)
    assert line[50][1] == pytest.approx(50.0, abs=0.01)


def test_smooth_when_there_is_a_gap_then_it_stays_and_hurts_no_neighbour() -> None:
    values = [y for _, y in smooth([(0, 1.0), (1, None), (2, 1.0)], 3)]
    assert values == [pytest.approx(1.0), None, pytest.approx(1.0)]


def test_thin_when_a_long_curve_has_one_spike_then_the_spike_and_both_ends_stay() -> None:
    points: list[tuple[float, float | None]] = [(x, math.sin(x / 500)) for x in range(10_000)]
    points[4321] = (4321, 50.0)
    kept = thin(points, 100)
    assert len(kept) <= 100
    assert (4321, 50.0) in kept
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_thin_when_short_then_unchanged() -> None:
    points: list[tuple[float, float | None]] = [(0, 1.0), (1, None)]
    assert thin(points, 10) == points


def test_thin_when_all_is_a_gap_then_the_gap_stays() -> None:
    kept = thin([(x, None) for x in range(50)], 10)
    assert len(kept) <= 10
    assert all(y is None for _, y in kept)


def test_rate_in_bins_when_marks_lie_between_bins_then_the_amount_is_kept() -> None:
    rates = rate_in_bins([(0.0, 0.0), (2.5, 100.0), (4.0, 130.0), (9.5, 130.0), (9.5, 137.0)], 10.0, 10)
    assert sum(rates) == pytest.approx(137)
    assert rates[0] == pytest.approx(40.0)
    assert rates[2] == pytest.approx(20.0 + 10.0)
    assert (rates[5], rates[9]) == (0.0, pytest.approx(7.0))


def test_in_chunks_when_uneven_then_every_item_is_in_exactly_one() -> None:
    items = list(range(103))
    chunks = [items[part] for part in in_chunks(len(items), 10)]
    assert [item for chunk in chunks for item in chunk] == items
    assert len(chunks) == 10
    assert in_chunks(3, 10) == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_rounded_when_given_gaps_then_they_stay() -> None:
    assert rounded([1.23456, None, 0.000123456]) == [1.235, None, 0.0001235]
