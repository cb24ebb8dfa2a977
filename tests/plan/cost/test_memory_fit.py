"""The memory beside jobs is learnt from measured peaks, and never below them."""

from __future__ import annotations

import random

import pytest

from weft.plan.admit import MARGIN
from weft.plan.cost.fit import Fit, MicrobatchLoad
from weft.plan.cost.memory_fit import ENOUGH, MemoryFit, memory_load

ESTIMATE = Fit({"fixed": 2e9, "rows": 1e6})
FULL = memory_load(8192, 512)


def fitted(num: int, rows: int, num_bytes: int) -> MemoryFit:
    found = MemoryFit()
    for _ in range(num):
        found.observe(memory_load(rows, 512), num_bytes)
    return found


def true_bytes(load: MicrobatchLoad) -> float:
    return 3e9 + 4e5 * load.rows + 30.0 * load.longest_pairs


def test_fit_when_peaks_follow_other_prices_then_loads_that_were_not_seen_are_predicted():
    rng, found = random.Random(0), MemoryFit()
    for _ in range(40):
        load = memory_load(rng.randrange(500, 6000), rng.choice([256, 512, 1024, 2048]))
        found.observe(load, round(true_bytes(load) * rng.uniform(0.998, 1.002)))
    for load in (FULL, memory_load(8192, 2048), memory_load(1000, 300)):
        assert found.predict(load, ESTIMATE) == pytest.approx(true_bytes(load), rel=0.01)
        assert abs(ESTIMATE.predict(load) / true_bytes(load) - 1) > 0.04


def test_fit_when_one_peak_stands_out_then_no_prediction_is_below_it():
    found = fitted(2 * ENOUGH, 8192, 4 * 10**9)
    found.observe(FULL, 6 * 10**9)
    assert found.predict(FULL, ESTIMATE) >= 6 * 10**9
    found.observe(FULL, 7 * 10**9)
    assert found.predict(FULL, ESTIMATE) >= 7 * 10**9, "between two fits too"


def test_fit_when_there_are_few_peaks_then_they_lower_the_estimate_by_the_margin_and_raise_it_freely():
    guess = ESTIMATE.predict(FULL)
    assert MemoryFit().predict(FULL, ESTIMATE) == guess
    low = fitted(ENOUGH - 1, 8192, 10**9)
    assert low.predict(FULL, ESTIMATE) == pytest.approx(guess * (1 - MARGIN))
    low.observe(FULL, 10**9)
    assert low.predict(FULL, ESTIMATE) < guess * 0.5, "enough peaks replace the estimate"
    assert fitted(1, 8192, 20 * 10**9).predict(FULL, ESTIMATE) == 20 * 10**9
    assert fitted(1, 9000, 20 * 10**9).predict(FULL, ESTIMATE) == guess, "larger microbatches give no estimate of these"
