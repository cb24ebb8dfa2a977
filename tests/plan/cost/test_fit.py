"""Fits: prices from measurements, and the error they admit to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.plan.cost.fit import MEMORY_TERMS, TIME_TERMS, Fit, FitError, MicrobatchLoad, OnlineFit, fit

SECONDS = Fit({"fixed": 2e-3, "rows": 4e-5, "pairs": 3e-9, "rank_tokens": 2e-8, "jobs": 1e-4})
BYTES = Fit(
    {
        "fixed": 1.7e10,
        "rows": 3.1e6,
        "pairs": 0.0,
        "longest_pairs": 2.0,
        "rank_tokens": 0.0,
        "rank_rows": 450.0,
        "parameters": 18.0,
    }
)


def random_loads(count: int, seed: int = 0) -> list[MicrobatchLoad]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        jobs = [
            (int(rng.choice([8, 16, 64])), rng.integers(16, 1024, rng.integers(1, 5)).tolist())
            for _ in range(rng.integers(1, 9))
        ]
        found.append(MicrobatchLoad.of(jobs, sum(rank for rank, _ in jobs) * 2_621_440, 64))
    return found


def noisy(prices: Fit, loads: list[MicrobatchLoad], noise: float, seed: int = 1) -> list[float]:
    rng = np.random.default_rng(seed)
    return [prices.predict(load) * (1 + noise * float(rng.standard_normal())) for load in loads]


def test_load_when_made_of_jobs_then_counts_what_each_term_means():
    load = MicrobatchLoad.of([(16, [10, 20]), (40, [5])], parameters=7, row_tile=32)
    assert (load.rows, load.pairs, load.longest_pairs) == (64, 525, 400)
    assert (load.rank_tokens, load.rank_rows, load.jobs, load.parameters) == (16 * 30 + 40 * 5, 64 * 64, 2, 7)
    assert MicrobatchLoad.of([(8, [10])], 0, widest_rank=100).rank_rows == 10 * 128
    bare = MicrobatchLoad.of([(0, [10])], 0)
    assert (bare.rank_rows, bare.jobs) == (0, 0)


@pytest.mark.parametrize(("prices", "terms"), [(SECONDS, TIME_TERMS), (BYTES, MEMORY_TERMS)])
def test_fit_when_values_are_exact_then_finds_the_prices(prices, terms):
    loads = random_loads(30)
    found = fit(loads, [prices.predict(load) for load in loads], terms)
    for term in terms:
        assert found.prices[term] == pytest.approx(
            prices.prices[term], rel=1e-5, abs=1e-8 * max(prices.prices.values())
        )


def test_fit_when_values_are_noisy_then_unseen_loads_are_met_within_the_noise():
    loads, unseen = random_loads(12), random_loads(200, seed=9)
    found = fit(loads, noisy(BYTES, loads, 0.002), MEMORY_TERMS)
    assert found.error(unseen, [BYTES.predict(load) for load in unseen]).mape < 0.0025
    found = fit(loads, noisy(SECONDS, loads, 0.02), TIME_TERMS)
    assert found.error(unseen, [SECONDS.predict(load) for load in unseen]).mape < 0.03


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=12))
def test_fit_when_values_are_anything_then_no_price_is_negative(values):
    found = fit(random_loads(len(values)), values, MEMORY_TERMS)
    assert set(found.prices) == set(MEMORY_TERMS)
    assert all(price >= 0 and np.isfinite(price) for price in found.prices.values())


def test_fit_when_small_and_large_loads_disagree_then_relative_errors_count():
    """Ten small loads at twice the price of one huge one: the price is nearer the small ones'."""
    small, huge = MicrobatchLoad.of([(0, [1])], 0), MicrobatchLoad.of([(0, [10**6])], 0)
    found = fit([small] * 10 + [huge], [2.0] * 10 + [10.0**6], ["rows"])
    assert found.prices["rows"] > 1.5


def test_fit_when_padded_batches_are_measured_then_mloras_three_coefficients_come_out():
    sizes = [(b, n) for b in (1, 2, 4) for n in (128, 256, 512)]
    loads = [MicrobatchLoad.of([(0, [n] * b)], 0) for b, n in sizes]
    found = fit(loads, [5e9 + 2e5 * b * n + 12.0 * b * n * n for b, n in sizes], ("fixed", "rows", "pairs"))
    assert list(found.prices.values()) == pytest.approx([5e9, 2e5, 12.0])


def test_fit_when_terms_were_never_varied_then_the_start_holds_them():
    start = Fit({**SECONDS.prices, "rows": 8e-5})
    loads = [MicrobatchLoad.of([(16, [256] * k)], 0) for k in (1, 2, 4, 8)]
    found = fit(loads, [SECONDS.predict(load) for load in loads], TIME_TERMS, start)
    assert found.prices["jobs"] == pytest.approx(start.prices["jobs"], rel=0.5)
    assert found.error(loads, [SECONDS.predict(load) for load in loads]).mape < 0.03
    assert start.error(loads, [SECONDS.predict(load) for load in loads]).mape > 0.3


@pytest.mark.parametrize("values", [[], [0.0], [float("nan")], [-1.0]])
def test_fit_when_values_are_no_measurements_then_refused(values):
    with pytest.raises(ConfigError, match="all finite and above 0"):
        fit(random_loads(len(values)), values, TIME_TERMS)


def test_error_when_counted_then_mean_and_the_bound_of_nineteen_in_twenty():
    found = FitError.of([1.0] * 18 + [1.1, 1.5], [1.0] * 20)
    assert found.mape == pytest.approx(0.03)
    assert found.p95 == pytest.approx(0.5)
    assert FitError.of([1.0] * 39 + [1.5], [1.0] * 40).p95 == pytest.approx(0.0)
    assert FitError.of([], []) == FitError(0.0, 0.0, 0)


def feed(online: OnlineFit, loads: list[MicrobatchLoad], values: list[float], every: int = 8) -> None:
    """Measurements one by one, learnt from now and then."""
    for index, (load, value) in enumerate(zip(loads, values, strict=True), start=1):
        online.observe(load, value)
        if index % every == 0:
            online.learn(online.seen)


def test_online_when_it_starts_wrong_then_measurements_take_over():
    start = Fit({term: 2 * price for term, price in SECONDS.prices.items()})
    online = OnlineFit(TIME_TERMS, current=start)
    loads = random_loads(104)
    assert online.predict(loads[0]) == pytest.approx(2 * SECONDS.predict(loads[0]))
    feed(online, loads, noisy(SECONDS, loads, 0.01))
    unseen = random_loads(50, seed=5)
    assert online.current.error(unseen, [SECONDS.predict(load) for load in unseen]).mape < 0.01


def test_online_when_it_reports_its_error_then_it_is_that_of_predictions_made_before():
    """A fit through its own points would claim no error at all."""
    online = OnlineFit(("fixed",))
    for value in (1.0, 2.0, 4.0):
        online.observe(MicrobatchLoad.of([], 0), value)
        if value == 1.0:
            online.learn(online.seen)
    assert online.error.count == 2
    assert online.error.mape == pytest.approx((0.5 + 0.75) / 2)


def test_online_when_the_device_changes_then_it_follows_within_its_window():
    online, loads = OnlineFit(TIME_TERMS, window=32), random_loads(160)
    slower = Fit({term: 1.5 * price for term, price in SECONDS.prices.items()})
    feed(online, loads, [(SECONDS if index < 60 else slower).predict(load) for index, load in enumerate(loads)])
    assert online.predict(loads[0]) == pytest.approx(slower.predict(loads[0]), rel=1e-3)
    assert online.error.count == len(online.seen) == 32


def test_online_when_a_mix_lacks_a_term_then_keeps_what_was_learnt_of_it_before():
    """One job of one rank for a long time: what ranks cost is still known when others come back."""
    online, loads = OnlineFit(TIME_TERMS, window=64), random_loads(64)
    feed(online, loads, [SECONDS.predict(load) for load in loads])
    alike = [MicrobatchLoad.of([(16, [512])], 0, 64)] * 128
    feed(online, alike, [SECONDS.predict(load) for load in alike])
    forgetful = OnlineFit(TIME_TERMS, window=64)
    feed(forgetful, alike, [SECONDS.predict(load) for load in alike])
    truth = [SECONDS.predict(load) for load in loads]
    assert online.current.error(loads, truth).mape < 0.01 < forgetful.current.error(loads, truth).mape


def test_online_when_a_value_is_no_measurement_then_it_is_left_out():
    online, loads = OnlineFit(TIME_TERMS), random_loads(20)
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        online.observe(loads[0], bad)
    assert online.seen == ()
    assert online.predict(loads[0]) is None, "nothing has been learnt"
    with pytest.raises(ConfigError, match="a fit needs some"):
        online.learn(online.seen)
