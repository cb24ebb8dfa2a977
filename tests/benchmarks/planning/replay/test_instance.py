"""Speeds on a shared instance: max-min fair, never above the hardware, from the cost model alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.replay.instance import PEFT, Instance, fill_level
from benchmarks.planning.replay.trace import TraceJob
from weft.errors import PlanError
from weft.plan.cost.types import LinearCost


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(1, 100))
def test_fill_level_when_shared_then_full_and_none_could_have_more_but_from_one_with_less(wants, capacity):
    shares = fill_level(wants, capacity)
    assert sum(shares) == pytest.approx(min(capacity, sum(wants)))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    level = max(shares, default=0.0)
    unmet = [share for share, want in zip(shares, wants, strict=True) if share < want - 1e-9]
    assert all(share == pytest.approx(level) for share in unmet)


def test_rates_when_a_tile_is_half_empty_then_a_neighbour_costs_nothing():
    instance = Instance(LinearCost(fixed_s=1.0, backward_ratio=2.0), capacity=8, row_tile=4)
    assert instance.microbatch_s(3) == 3 * (1 + 4)
    two, three = TraceJob("two", 0, 1, 2), TraceJob("three", 0, 1, 3)
    assert instance.rates([two]) == [pytest.approx(2 / 15)]
    assert instance.rates([two, two]) == [pytest.approx(2 / 15)] * 2
    assert instance.rates([two, three]) == [pytest.approx(2 / 27), pytest.approx(3 / 27)]
    assert instance.rates([]) == []
    assert instance.peak_rate == pytest.approx(8 / 27)


def test_rates_when_samples_are_padded_then_only_their_own_tokens_count():
    """A second a row: 2 samples of 3 tokens padded to 4, beside 1 sample of 10."""
    short, long = TraceJob("short", 0, 1, 6, num_samples=2, longest=4), TraceJob("long", 0, 1, 10)
    own = Instance(LinearCost(token_s=0.5), capacity=100, row_tile=1, padding="own")
    assert own.rates([short]) == [pytest.approx(6 / 8)]
    assert own.rates([short, long]) == [pytest.approx(6 / 18), pytest.approx(10 / 18)]
    fused = dataclasses.replace(own, padding="fused")
    assert fused.rates([short]) == own.rates([short])
    assert fused.rates([short, long]) == [pytest.approx(6 / 30), pytest.approx(10 / 30)]


def test_rates_when_the_host_sets_the_pace_then_a_small_batch_takes_as_long_as_a_larger_one():
    """PEFT on an H200: 196 ms a step, whether of 64 rows or of 1,024."""
    small, larger = TraceJob("small", 0, 1, 64), TraceJob("larger", 0, 1, 1024)
    assert PEFT.rates([small])[0] == pytest.approx(64 * 1303 / 256)
    assert PEFT.rates([larger])[0] == pytest.approx(1024 * 1303 / 256)
    assert PEFT.rates([TraceJob("large", 0, 1, 8192)])[0] == pytest.approx(10_672)


def test_instance_when_it_has_no_capacity_then_refused():
    with pytest.raises(PlanError, match="instance: capacity is 0 and row_tile 4; both must be at least 1"):
        Instance(capacity=0, row_tile=4)
