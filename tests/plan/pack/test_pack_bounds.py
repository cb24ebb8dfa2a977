"""No lower bound is ever above what brute force finds, and each is needed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from round_cases import SMALL, SMALL_LIMITS, fewest_by_force, segments_of

from weft.plan.pack.bins import by_duals, by_halves, by_tokens, fewest_bins
from weft.plan.pack.types import RoundLimits


@settings(max_examples=60)
@given(SMALL, SMALL_LIMITS)
def test_bounds_when_any_samples_then_none_is_above_the_optimum(lengths, limits):
    segments = segments_of(*([min(n, limits.room) for n in own] for own in lengths))
    sizes = np.sort(np.array([s.length for s in segments]))
    best = fewest_by_force(segments, limits)
    bounds = by_tokens(segments, limits), by_halves(sizes, limits.room), by_duals(sizes, limits.room)
    assert max(bounds) <= best
    assert fewest_bins(segments, limits) == max(bounds)


def test_by_tokens_when_padding_counts_then_each_job_is_padded_once():
    segments = segments_of([9, 9], [3])
    assert by_tokens(segments, RoundLimits(24, padding_multiple=1)) == 1
    assert by_tokens(segments, RoundLimits(24, padding_multiple=8)) == 2


def test_by_halves_when_large_samples_cannot_pair_then_each_counts():
    assert by_halves(np.array([13, 13, 13]), 24) == 3
    # Two of 14 leave 10 each, in which samples of 11 have no place.
    assert by_halves(np.array([11, 11, 14, 14]), 24) == 3
    assert by_halves(np.array([5, 5, 14, 14]), 24) == 2


def test_by_duals_when_thirds_do_not_fit_then_it_beats_the_tokens():
    """Five samples just above a third: no three share a bin."""
    lengths = np.array([9, 9, 9, 9, 9])
    assert by_duals(lengths, 24) == 3
    assert by_tokens(segments_of(lengths.tolist()), RoundLimits(24)) == 2
