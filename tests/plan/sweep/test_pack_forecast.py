"""Replicas have the stages that the packs of what is left end soonest with."""

from __future__ import annotations

import pytest

from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.layout import parse_layout
from weft.plan.replan import RemainingJob
from weft.plan.sweep.forecast import PackForecaster, can_be_packs

SHAPE = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict(), "llama-3.1-8b")
ONE = parse_layout("stages:1")


def forecaster(num_devices: int) -> PackForecaster:
    return PackForecaster(AnalyticCost(SHAPE, find_hardware("h100")), 4096, num_devices)


def jobs(*sizes: tuple[int, int]) -> list[RemainingJob]:
    """Of so many samples of 512 tokens a step, and so many steps; eight samples are a microbatch."""
    return [RemainingJob(f"t{i}", batch, (512,), 16, steps) for i, (batch, steps) in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(16, 100)] * 8, "spread:4"),
        ([(32, 100)], "stages:4"),
        ([(1, 100)], "stages:1"),
        ([(16, 100), (8, 155)], "stages:2+stages:1"),
    ],
    ids=["many", "one of many microbatches", "one of a single microbatch", "unlike"],
)
def test_packs_when_few_are_left_then_they_get_stages_that_they_can_fill(sizes, expected):
    """A global batch of one microbatch passes one stage after another, so more of them do not help it."""
    found = forecaster(3 if "+" in expected else 4)(jobs(*sizes), ONE)
    assert str(found.planned.layout) == expected
    assert found.now is not None and found.planned.left_s <= found.now.left_s
    assert set(found.planned.homes) == {f"t{i}" for i in range(len(sizes))}
    if "+" in expected:
        assert found.planned.homes == {"t0": 0, "t1": 1}


def test_packs_when_the_layout_of_now_is_as_good_then_it_stays():
    found = forecaster(4)(jobs((16, 100), (16, 100)), parse_layout("stages:1+stages:3"))
    again = forecaster(4)(jobs((16, 100), (16, 100)), found.planned.layout)
    assert again.planned is again.now and again.now.homes == found.planned.homes


def test_packs_when_one_device_cannot_hold_the_model_then_layouts_of_whole_copies_cannot_be():
    small = PackForecaster(AnalyticCost(SHAPE, find_hardware("rtx-4090")), 1024, 4)
    found = small([RemainingJob(f"t{i}", 1, (512,), 128, 100) for i in range(16)], parse_layout("spread:4"))
    assert found.now is None and all(replica.stages > 1 for replica in found.planned.layout.replicas)


def test_packs_when_a_layout_or_a_job_is_of_another_kind_then_it_is_not_planned_in_packs():
    shared = RemainingJob("t0", 1, (512,), 16, 100, is_any_order=True)
    assert can_be_packs(parse_layout("stages:2+stages:1"), jobs((1, 1)))
    assert not any(can_be_packs(parse_layout(text), jobs((1, 1))) for text in ("tensor:2", "shards:2+stages:1"))
    assert not can_be_packs(ONE, [shared])
