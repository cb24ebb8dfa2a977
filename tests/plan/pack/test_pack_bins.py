"""Every heuristic packs every sample once within the capacity; subset sums are exact."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import CAPACITY, SMALL, by_index, fewest_by_force, segments_of

from weft.plan.pack.bins import best_fit, fewest, filled, first_fit, next_fit, subset, taken


@pytest.mark.parametrize("packer", [best_fit, first_fit, filled, next_fit])
@given(lengths=SMALL)
def test_bins_when_any_samples_then_each_is_packed_once_and_fits(packer, lengths):
    segments = segments_of(*lengths)
    bins = packer(segments, CAPACITY)
    assert sorted((s for own in bins for s in own), key=by_index) == segments
    assert all(own and taken(own) <= CAPACITY for own in bins)


@given(st.lists(st.integers(1, 30), max_size=8), st.integers(0, 60))
def test_subset_when_any_lengths_then_no_other_is_nearer_to_the_target(lengths, target):
    chosen = subset(lengths, target)
    sums = [sum(own) for r in range(len(lengths) + 1) for own in itertools.combinations(lengths, r)]
    assert len(set(chosen)) == len(chosen)
    assert sum(lengths[i] for i in chosen) == max(s for s in sums if s <= target)


@settings(max_examples=60)
@given(SMALL)
def test_fewest_when_small_then_at_most_one_above_the_optimum(lengths):
    segments = segments_of(*lengths)
    best = fewest_by_force(segments)
    assert best <= len(fewest(segments, CAPACITY, best)) <= best + 1


def test_filled_when_first_fit_wastes_room_then_bins_are_full_to_the_token():
    """Decreasing first fit puts 10 and 9 together; only 10, 8, 6 twice and so on fill all bins."""
    segments = segments_of([10, 10, 8, 8, 6, 6])
    assert [sum(s.length for s in own) for own in filled(segments, CAPACITY)] == [24, 24]


def test_first_fit_when_two_bins_have_room_then_takes_the_first_and_best_fit_the_fullest():
    segments = segments_of([14, 16, 7])
    assert [len(own) for own in first_fit(segments, CAPACITY)] == [2, 1]
    segments = segments_of([13, 14, 7])
    assert [[s.length for s in own] for own in best_fit(segments, CAPACITY)] == [[14, 7], [13]]
