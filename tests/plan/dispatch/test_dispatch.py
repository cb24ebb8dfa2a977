"""Balanced dispatch, and the ways it is compared with."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fleets import equation_3, rated_fleet, small_replicas
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.deploy.buckets import choose_buckets
from weft.plan.deploy.dispatch import dispatch, dispatch_by_length, dispatch_evenly, relax
from weft.plan.deploy.fleet import Fleet

PUBLISHED = {
    (4, 2, 0, 1): 14.829,
    (2, 3, 0, 1): 15.249,
    (4, 0, 1, 1): 15.579,
    (0, 4, 0, 1): 15.646,
    (6, 1, 0, 1): 15.773,
    (0, 0, 0, 2): 19.807,
}


@pytest.mark.parametrize("plan", PUBLISHED)
def test_dispatch_when_a_plan_of_figure_4_is_given_then_no_slower_than_the_integer_program(plan):
    fleet = rated_fleet(plan)
    assert equation_3(fleet) == pytest.approx(PUBLISHED[plan], abs=1e-3)
    found = dispatch(fleet)
    assert found.bound_s <= found.step_s <= PUBLISHED[plan] + 1e-3


def test_dispatch_by_length_when_given_the_best_plan_of_figure_4_then_as_unlevel_as_published():
    found = dispatch_by_length(rated_fleet((4, 2, 0, 1)))
    assert [round(max(found.seconds[k] for k in own), 2) for own in ((0, 1, 2, 3), (4, 5), (6,))] == [
        19.64,
        15.41,
        9.92,
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 800), min_size=1, max_size=80),
    counts=st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 3)),
    num_buckets=st.integers(1, 8),
    is_packed=st.booleans(),
)
def test_dispatch_when_any_batch_is_shared_out_then_every_sample_is_there_once(lengths, counts, num_buckets, is_packed):
    """And on a replica that holds it, and done no sooner than the bound."""
    kinds = small_replicas(is_packed=is_packed)
    models = [model for model, count in zip(kinds, counts, strict=True) for _ in range(count)]
    buckets = choose_buckets(lengths, num_buckets, grain=8)
    fleet = Fleet(models, buckets)
    shared = dispatch(fleet)
    again = dispatch(fleet, relax(fleet, shared.step_s))
    for found in (shared, again, dispatch_by_length(fleet)):
        counts_KR = np.array(found.counts)
        assert counts_KR.sum(axis=0).tolist() == list(buckets.counts)
        for model, own in zip(models, counts_KR, strict=True):
            assert all(bound <= model.most_tokens for bound, count in zip(buckets.bounds, own, strict=True) if count)
        assert found.step_s >= found.bound_s * (1 - 1e-9)


def test_dispatch_when_all_shares_are_tried_then_hardly_any_is_better():
    """Two unlike replicas, three buckets, 40 fixed batches."""
    rng = np.random.default_rng(7)
    ratios = []
    for _ in range(40):
        lengths = rng.integers(20, 400, 14).tolist()
        buckets = choose_buckets(lengths, 3, grain=8)
        fleet = Fleet([*small_replicas()[:2], small_replicas()[2]], buckets)
        ratios.append(dispatch(fleet).step_s / _best_of_all(fleet))
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) < 1.02 and max(ratios) < 1.12


def _best_of_all(fleet: Fleet) -> float:
    shares = []
    for bucket, count in enumerate(fleet.buckets.counts):
        takers = np.flatnonzero(fleet.holds_KR[:, bucket])
        ways = itertools.product(range(int(count) + 1), repeat=len(takers))
        shares.append([dict(zip(takers, way, strict=True)) for way in ways if sum(way) == count])
    best = np.inf
    for choice in itertools.product(*shares):
        counts = np.zeros(fleet.size_KR.shape, dtype=np.int64)
        for bucket, way in enumerate(choice):
            counts[list(way), bucket] = list(way.values())
        best = min(best, float(fleet.seconds(counts).max()))
    return best


def test_seconds_when_chunks_are_padded_then_follow_equation_12():
    """Of 200 tokens: two chunks of two samples and one of one; the second stage waits for the longest of them."""
    lengths = [100] * 5
    buckets = choose_buckets(lengths, 1, grain=100)
    one, two, _ = small_replicas()
    chunk = {n: 4 * (1e-6 * n * 100**2 + 1e-3 * n * 100 + 0.02) for n in (1, 2)}
    assert Fleet([one], buckets).seconds(np.array([[5]])) == pytest.approx(2 * chunk[2] + chunk[1])
    half = {n: 2 * (1e-6 * n * 100**2 + 1.1e-3 * n * 100 + 0.02) for n in (1, 4)}
    assert Fleet([two], buckets).seconds(np.array([[5]])) == pytest.approx(half[4] + half[1] + half[4])


def test_seconds_when_samples_are_packed_then_padding_costs_nothing():
    lengths = [10, 190]
    buckets = choose_buckets(lengths, 1, grain=200)
    counts = np.array([[2]])
    packed, padded = (Fleet(small_replicas(is_packed=p)[:1], buckets).seconds(counts)[0] for p in (True, False))
    assert packed == pytest.approx(4 * (1e-6 * (10**2 + 190**2) + 1e-3 * 200 + 0.02))
    assert padded == pytest.approx(2 * 4 * (1e-6 * 200**2 + 1e-3 * 200 + 0.02))


def test_dispatch_evenly_when_replicas_are_alike_then_counts_differ_by_one_at_most():
    found = dispatch_evenly(rated_fleet((0, 0, 0, 2)))
    assert found.counts == ((98, 31, 8, 2), (98, 31, 8, 2))


def test_dispatch_when_it_cannot_be_then_refused():
    with pytest.raises(PlanError, match=r"up to 16,384 tokens; the largest replica holds 8,192"):
        rated_fleet((0, 0, 1, 0))
    with pytest.raises(PlanError, match="even shares need that all can"):
        dispatch_evenly(rated_fleet((1, 0, 0, 1)))
    with pytest.raises(PlanError, match="there are no replicas"):
        Fleet([], choose_buckets([5]))
    with pytest.raises(PlanError, match="some replicas are packed and some padded"):
        Fleet([small_replicas()[2], small_replicas(is_packed=True)[2]], choose_buckets([5]))
