"""Bucket bounds with the least padding."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.deploy.buckets import Buckets, choose_buckets, fixed_buckets


def padding(buckets: Buckets) -> float:
    """Tokens added to the samples."""
    padded = sum(bound * count for bound, count in zip(buckets.bounds, buckets.counts, strict=True))
    return padded - sum(buckets.tokens)


@pytest.mark.parametrize(
    ("lengths", "num_buckets", "bounds", "added"),
    [
        ([100, 200, 300, 1000], 2, (304, 1008), 320),
        ([100, 200, 300, 1000], 3, (112, 304, 1008), 128),
        ([17, 33, 65, 129, 257, 513], 3, (80, 272, 528), 298),
        ([128] * 50 + [256] * 30 + [512] * 10 + [2048] * 3 + [8000], 4, (256, 512, 2048, 8000), 6400),
    ],
)
def test_choose_buckets_when_the_answer_is_known_then_gives_it(lengths, num_buckets, bounds, added):
    found = choose_buckets(lengths, num_buckets, grain=16)
    assert (found.bounds, padding(found)) == (bounds, added)


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30), num_buckets=st.integers(1, 12))
def test_choose_buckets_when_all_bounds_are_tried_then_none_pads_less(lengths, num_buckets):
    """At most twelve intervals, so that every choice of bounds can be tried."""
    grain = 17
    uppers = sorted({-(-length // grain) * grain for length in lengths})
    found = choose_buckets(lengths, num_buckets, grain)
    count = min(num_buckets, len(uppers))
    tried = [fixed_buckets(lengths, (*inner, uppers[-1])) for inner in itertools.combinations(uppers[:-1], count - 1)]
    assert padding(found) == min(map(padding, tried))
    assert len(found.bounds) <= num_buckets and sum(found.counts) == len(lengths)


def test_indices_when_a_sample_equals_a_bound_then_it_is_in_that_bucket():
    found = fixed_buckets([64, 65, 128], [64, 128])
    assert found.indices_of([64, 65, 128]) == [0, 1, 1]
    assert found.tokens == (64, 193) and found.pairs == (64**2, 65**2 + 128**2)


def test_buckets_when_input_makes_no_sense_then_refused():
    with pytest.raises(PlanError, match="got 0 samples"):
        choose_buckets([])
    with pytest.raises(PlanError, match="num_buckets is 0"):
        choose_buckets([5], 0)
    with pytest.raises(PlanError, match="a sample has 100 tokens; the largest bound is 64"):
        fixed_buckets([100], [64])
