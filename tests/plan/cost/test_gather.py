"""From how many tokens on gathering is hidden follows from rates alone."""

from __future__ import annotations

import pytest

from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.divided import GatherCost
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import SHAPES, ModelShape

SHAPE = ModelShape.from_config(SHAPES["llama-3.1-8b"].config().to_dict())


def gather(shards: int, quantize: str = "none", device: str = "h200") -> GatherCost:
    return GatherCost(MemoryModel(SHAPE, quantize, shards=shards), find_hardware(device))


def test_gathering_when_a_microbatch_has_that_many_tokens_then_takes_no_longer_than_products():
    """Two ways to the same number: per layer in seconds, and from rates alone."""
    cost = gather(8)
    tokens = cost.hidden_from_tokens
    products_s = 2 * SHAPE.layer_weights * tokens / cost.product_flop
    assert products_s == pytest.approx(cost.layer_s, rel=0.01)
    layer_s = AnalyticCost(SHAPE, cost.hardware, rank=0).forward_s([tokens], 0) / SHAPE.num_layers
    assert layer_s >= cost.layer_s


@pytest.mark.parametrize(("shards", "quantize"), [(2, "none"), (8, "none"), (8, "int8"), (8, "nf4")])
def test_fewer_bytes_and_fewer_others_need_fewer_tokens(shards, quantize):
    whole = gather(8).hidden_from_tokens
    bits = {"none": 16, "int8": 8, "nf4": 4.5}[quantize]
    expected = whole * (1 - 1 / shards) / (1 - 1 / 8) * bits / 16
    assert gather(shards, quantize).hidden_from_tokens == pytest.approx(expected, abs=1)


def test_plan_reports_from_where_on_gathering_is_hidden_and_by_which_links():
    held, text = gather(8).notes()
    assert held.startswith("each of 8 devices holds about ")
    assert f"hidden from {gather(8).hidden_from_tokens:,} tokens" in text
    assert "360 GB/s (h200, links assumed)" in text
    # As benchmarks/README.md.
    assert gather(8).hidden_from_tokens == pytest.approx(1650, abs=10)
    assert gather(8, device="rtx-4090").hidden_from_tokens > gather(8).hidden_from_tokens
