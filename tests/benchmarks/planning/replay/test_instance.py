"""Speeds on a shared instance: max-min fair, never above the hardware, from the cost model alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.replay.instance import Instance, fill_level
from weft.cost.types import LinearCost
from weft.errors import PlanError


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(1, 100))
def test_fill_level_when_shared_then_full_and_nobody_could_have_more_but_from_one_with_less(wants, capacity):
    shares = fill_level(wants, capacity)
    assert sum(shares) == pytest.approx(min(capacity, sum(wants)))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    level = max(shares, default=0.0)
    unmet = [share for share, want in zip(shares, wants, strict=True) if share < want - 1e-9]
    assert all(share == pytest.approx(level) for share in unmet)


def test_rates_when_a_tile_is_half_empty_then_a_neighbour_costs_nothing():
    instance = Instance(LinearCost(fixed_s=1.0, backward_ratio=2.0), capacity=8, row_tile=4)
    assert instance.microbatch_s(3) == 3 * (1 + 4)
    assert instance.rates([2]) == [pytest.approx(2 / 15)]
    assert instance.rates([2, 2]) == [pytest.approx(2 / 15)] * 2
    assert instance.rates([2, 3]) == [pytest.approx(2 / 27), pytest.approx(3 / 27)]
    assert instance.rates([]) == []
    assert instance.peak_rate == pytest.approx(8 / 27)


def test_instance_when_it_has_no_capacity_then_refused():
    with pytest.raises(PlanError, match="instance: capacity is 0 and row_tile 4; both must be at least 1"):
        Instance(capacity=0, row_tile=4)
