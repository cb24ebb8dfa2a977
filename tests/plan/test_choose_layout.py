"""The layout of a run that names none: what fits first, then what is fastest, then what is simplest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import PlanError
from weft.plan.choose_layout import LayoutJob, LayoutOption, choose_layout, price_layout, split_model
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.layout import parse_layout

SHAPE = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict(), "llama-3.1-8b")
COST = AnalyticCost(SHAPE, find_hardware("h100"))
GIB = 2**30
PLENTY = 10_000 * GIB
FREE, ORDERED = LayoutJob(32_000, 16, is_any_order=True), LayoutJob(32_000, 16)


def chosen(jobs: list[LayoutJob], num_devices: int = 4, memory: int = PLENTY, cost: AnalyticCost = COST) -> str:
    return str(choose_layout(cost, jobs, 8192, num_devices, memory).chosen.layout)


@pytest.mark.parametrize(
    ("jobs", "layout"),
    [([FREE], "spread:4"), ([ORDERED] * 8, "spread:4"), ([FREE, ORDERED, ORDERED, ORDERED], "spread:4")],
)
def test_layout_when_a_replica_fits_and_work_can_be_shared_out_then_whole_replicas(jobs, layout):
    assert chosen(jobs) == layout


def test_layout_when_one_job_has_ordered_sums_then_stages_that_its_microbatches_fill():
    """It has one home, so replicas beside it would idle."""
    assert chosen([LayoutJob(400_000, 16)]).startswith("stages:")


def test_layout_when_batches_are_short_then_no_stages_that_they_cannot_fill():
    """A step of one microbatch goes through all stages before the job's next one begins."""
    short = [LayoutJob(500, 16)] * 2
    assert price_layout(COST, short, 8192, parse_layout("stages:4")).speed < 2
    assert chosen(short) == "spread:4"
    assert price_layout(COST, [ORDERED] * 8, 8192, parse_layout("stages:4")).speed > 3


@pytest.mark.parametrize("layout", ["spread:2", "shards:2"])
def test_price_when_a_microbatch_takes_as_long_half_full_then_halving_it_gains_little(layout):
    """Launches, and reading the weights, take as long for a few tokens."""
    few = [LayoutJob(20, 16, is_any_order=True)]
    assert price_layout(COST, few, 8192, parse_layout(layout)).speed < 1.2
    assert price_layout(COST, [FREE], 8192, parse_layout(layout)).speed > 1.9


def test_layout_when_there_is_one_device_then_that():
    assert chosen([FREE], num_devices=1) == "stages:1"


def test_layout_when_a_replica_does_not_fit_then_shards_on_fast_links_and_stages_on_slow_ones():
    """All layouts but those two are reported not to fit."""
    whole = choose_layout(COST, [ORDERED] * 8, 8192, 1, PLENTY).chosen.device_bytes
    memory = int(0.9 * whole)
    found = choose_layout(COST, [ORDERED] * 8, 8192, 4, memory)
    assert str(found.chosen.layout) == "shards:4" and "(chosen, predicted)" in found.lines[0]
    assert sum("does not fit" in line for line in found.lines) >= 2
    slow = replace(COST, hardware=replace(COST.hardware, link_rate=1e9))
    assert chosen([ORDERED] * 8, memory=memory, cost=slow).startswith("stages:")


def test_layout_when_nothing_fits_then_refused_with_the_arithmetic():
    with pytest.raises(
        PlanError, match=r"fits on no layout of 4 devices: .* needs .* GiB a device, which have 1\.0 GiB"
    ):
        choose_layout(COST, [FREE], 8192, 4, GIB)
    with pytest.raises(PlanError, match="at least one of each"):
        choose_layout(COST, [], 8192, 4, PLENTY)


def test_price_when_replicas_are_unlike_then_each_counts_by_its_speed():
    """And an ordered job has the fastest of them at most."""
    speed = {
        layout: price_layout(COST, [FREE] * 8, 8192, parse_layout(layout)).speed
        for layout in ("stages:1", "stages:2", "stages:1+stages:2", "tensor:2")
    }
    assert speed["stages:1"] == 1
    assert speed["stages:1+stages:2"] == pytest.approx(1 + speed["stages:2"])
    assert 1 < speed["tensor:2"] < 2
    alone = price_layout(COST, [ORDERED], 8192, parse_layout("stages:1+tensor:2"))
    assert alone.speed == pytest.approx(price_layout(COST, [ORDERED], 8192, parse_layout("tensor:2")).speed)


def test_price_when_layers_are_shared_then_a_device_needs_less():
    whole, halves = (price_layout(COST, [FREE], 8192, parse_layout(text)) for text in ("stages:1", "tensor:2"))
    assert halves.device_bytes < 0.7 * whole.device_bytes


def test_price_when_weights_are_shared_then_embedding_and_head_and_two_layers_are_still_whole():
    """Only the slices of the others are elsewhere."""
    whole, shards = (price_layout(COST, [FREE], 8192, parse_layout(text)) for text in ("stages:1", "shards:4"))
    layers = SHAPE.num_layers * SHAPE.layer_weights * 2
    two = 2 * SHAPE.layer_weights * 2
    assert whole.device_bytes - shards.device_bytes == pytest.approx(0.75 * layers - two, abs=1)


def test_price_when_stages_are_shared_then_needs_less_than_either_and_fewer_jobs_fill_it():
    """A stage's slices and two layers; two jobs fill two pipelines, of which four shards leave two idle."""
    both, stages, shards = (
        price_layout(COST, [ORDERED] * 2, 8192, parse_layout(text))
        for text in ("shards:2,stages:2", "stages:2", "shards:4")
    )
    layers = split_model(SHAPE, 2)[0] * SHAPE.layer_weights * 2
    two = 2 * SHAPE.layer_weights * 2
    assert stages.device_bytes - both.device_bytes == pytest.approx(0.5 * layers - two, abs=1)
    assert both.speed > 1.1 * shards.speed and both.speed > 1.1 * stages.speed
    listed = choose_layout(COST, [ORDERED] * 2, 8192, 4, PLENTY).options
    assert [str(option.layout) for option in listed].count("shards:2,stages:2") == 1


def test_option_when_shown_then_small_sizes_are_not_nothing_and_it_has_the_name_that_was_requested():
    option = LayoutOption(parse_layout("shards:1"), 2**22, 1.0)
    assert option.line(GIB, "shards:1") == (
        "shards:1: up to 4.0 MiB of 1.0 GiB a device with full microbatches, 1.00x as fast as one"
    )
    assert option.line(2**20) == "stages:1: up to 4.0 MiB of 1.0 MiB a device with full microbatches, does not fit"


def test_layout_when_sharing_every_layer_is_faster_then_is_proposed_and_never_chosen():
    """A job whose step is one microbatch can use several devices in no other way."""
    short = [LayoutJob(8000, 16)]
    found = choose_layout(COST, short, 8192, 8, PLENTY)
    (line,) = (line for line in found.lines if "tensor" in line)
    assert found.chosen.layout.replicas[0].tensor == 1 and all(o.layout.replicas[0].tensor == 1 for o in found.ranked)
    assert line.startswith("tensor:") and line.endswith("not chosen, since it changes bits: --layout tensor:8")
    slow = replace(COST, hardware=replace(COST.hardware, link_rate=1e9))
    for cost, jobs in ((slow, short), (COST, [FREE] * 8)):
        assert not any("tensor" in line for line in choose_layout(cost, jobs, 8192, 8, PLENTY).lines)
