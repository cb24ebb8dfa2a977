"""Jobs whose samples stay together: each has one replica as its home, around which other samples are shared out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fleets import small_replicas
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.deploy.buckets import choose_buckets
from weft.plan.deploy.dispatch import dispatch, dispatch_by_length, dispatch_evenly
from weft.plan.deploy.fleet import Fleet

LENGTHS = st.lists(st.integers(1, 800), min_size=1, max_size=12)


def fleet_of(jobs: list[list[int]], others: list[int], counts: tuple[int, ...], *, is_packed: bool = False) -> Fleet:
    """Jobs with a home each, and samples beside them, on so many of the small replicas."""
    kinds = small_replicas(is_packed=is_packed)
    models = [model for model, count in zip(kinds, counts, strict=True) for _ in range(count)]
    lengths = [*itertools.chain(*jobs), *others]
    return Fleet(models, choose_buckets(lengths, 6, grain=8).with_homes(jobs))


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(LENGTHS, min_size=1, max_size=4),
    others=st.lists(st.integers(1, 800), max_size=30),
    counts=st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 2)),
    is_packed=st.booleans(),
)
def test_dispatch_when_jobs_have_homes_then_all_samples_of_a_job_are_where_it_is(jobs, others, counts, is_packed):
    """And nothing is lost or doubled, and every home holds its job, and nothing ends before the bound."""
    fleet = fleet_of(jobs, others, counts, is_packed=is_packed)
    for found in (dispatch(fleet), dispatch_by_length(fleet)):
        counts_KR = np.array(found.counts)
        assert counts_KR.sum(axis=0).tolist() == list(fleet.buckets.counts)
        at_home = np.zeros_like(counts_KR)
        for home, own_R in zip(found.homes, fleet.home_JR, strict=True):
            at_home[home] += own_R
        assert (counts_KR >= at_home).all() and (fleet.holds_KR | (counts_KR == 0)).all()
        assert found.seconds == pytest.approx(fleet.seconds(counts_KR)) and found.step_s >= found.bound_s * (1 - 1e-9)


def test_dispatch_when_homes_are_given_then_jobs_are_there_and_nothing_else_moves_them():
    """A run keeps them from step to step, whatever a batch has."""
    jobs = [[100] * 8, [100] * 2]
    fleet = fleet_of(jobs, [50] * 4, (2, 0, 0))
    assert sorted(fleet.homes) == [0, 1] and dispatch(fleet).homes == fleet.homes
    given = Fleet(fleet.models, fleet.buckets, (1, 1))
    for found in (dispatch(given), dispatch_by_length(given), dispatch_evenly(given)):
        assert found.homes == (1, 1) and sum(found.counts[1]) >= 10


def test_homes_when_all_are_tried_by_a_steps_own_seconds_then_few_are_better():
    """The rule takes chunks as full and pipelines as filled, as in a run of many steps; a single step is less even."""
    rng, ratios = np.random.default_rng(5), []
    for _ in range(30):
        jobs = [rng.integers(20, 200, rng.integers(8, 40)).tolist() for _ in range(5)]
        fleet = fleet_of(jobs, [], (2, 1, 0), is_packed=True)
        best = np.inf
        for homes in itertools.product(range(3), repeat=len(jobs)):
            counts_KR = np.zeros(fleet.size_KR.shape, dtype=np.int64)
            np.add.at(counts_KR, list(homes), fleet.home_JR)
            best = min(best, float(fleet.seconds(counts_KR).max()))
        ratios.append(dispatch(fleet).step_s / best)
    assert min(ratios) >= 1 - 1e-9 and np.mean(ratios) < 1.03


def test_dispatch_when_a_job_has_a_home_then_replicas_beside_it_do_not_make_it_faster():
    """Two replicas halve what may be shared out, and leave a job at home as it is."""
    samples = [100] * 16
    one, two = (fleet_of([samples], [], (count, 0, 0)) for count in (1, 2))
    assert dispatch(one).step_s == pytest.approx(dispatch(two).step_s) == pytest.approx(dispatch_evenly(two).step_s)
    shared = [fleet_of([], samples, (count, 0, 0)) for count in (1, 2)]
    assert dispatch(shared[1]).step_s == pytest.approx(dispatch(shared[0]).step_s / 2)
    assert dispatch(two).homes == (0,) and not any(dispatch(two).counts[1])


def test_dispatch_when_free_samples_come_beside_a_job_at_home_then_they_go_to_the_empty_replica():
    fleet = fleet_of([[100] * 8], [100] * 8, (2, 0, 0))
    found = dispatch(fleet)
    assert sorted(sum(own) for own in found.counts) == [8, 8]
    assert found.step_s == pytest.approx(dispatch(fleet_of([], [100] * 16, (2, 0, 0))).step_s)
