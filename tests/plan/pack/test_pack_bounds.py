"""No lower bound is ever above what brute force finds, and each is needed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from round_cases import CAPACITY, SMALL, fewest_by_force, segments_of

from weft.plan.pack.bins import by_duals, by_halves, fewest_bins


@settings(max_examples=60)
@given(SMALL)
def test_bounds_when_any_samples_then_none_is_above_the_optimum(lengths):
    segments = segments_of(*lengths)
    sizes = np.sort(np.array([s.length for s in segments]))
    bounds = -(-sizes.sum() // CAPACITY), by_halves(sizes, CAPACITY), by_duals(sizes, CAPACITY)
    assert max(bounds) <= fewest_by_force(segments)
    assert fewest_bins(segments, CAPACITY) == max(bounds)


def test_by_halves_when_large_samples_cannot_pair_then_each_counts():
    assert by_halves(np.array([13, 13, 13]), 24) == 3
    # Two of 14 leave 10 each, in which samples of 11 have no place.
    assert by_halves(np.array([11, 11, 14, 14]), 24) == 3
    assert by_halves(np.array([5, 5, 14, 14]), 24) == 2


def test_by_duals_when_thirds_do_not_fit_then_it_beats_the_tokens():
    """Five samples just above a third: no three share a bin."""
    lengths = np.array([9, 9, 9, 9, 9])
    assert by_duals(lengths, 24) == 3
    assert -(-lengths.sum() // 24) == 2
