"""The analytic cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from h200_runs import FP8_RUNS, RUNS, H200Run
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import DEVICES
from weft.plan.cost.shape import SHAPES, ModelShape

LLAMA = ModelShape.from_config(SHAPES["llama-3.1-8b"].config().to_dict(), "llama-3.1-8b")
COST = AnalyticCost(LLAMA, DEVICES["h200"])
LENGTHS = st.lists(st.integers(1, 4096), min_size=1, max_size=16)


def both_s(cost: AnalyticCost, lengths: list[int], stage: int = 0) -> float:
    return cost.forward_s(lengths, stage) + cost.backward_s(lengths, stage)


@pytest.mark.parametrize("run", [*RUNS, *FP8_RUNS], ids=lambda run: run.name)
def test_step_when_compared_with_an_h200_then_within_a_tenth(run: H200Run):
    """Whole steps, optimizers included, at four kinds of load and two of storage."""
    rank = round(sum(run.ranks) / len(run.ranks)) if run.ranks else 0
    cost = AnalyticCost(
        run.shape, DEVICES["h200"], quantize=run.quantize, rank=rank, num_jobs=len(run.ranks), row_tile=64
    )
    predicted = both_s(cost, run.lengths) + len(run.ranks) * cost.step_s(0)
    assert predicted == pytest.approx(run.seconds, rel=0.10)


@given(LENGTHS)
def test_stages_when_summed_then_take_what_one_device_takes(lengths):
    parts = replace(COST, num_stages=5)
    assert sum(both_s(parts, lengths, stage) for stage in range(5)) == pytest.approx(both_s(COST, lengths))
    assert sum(parts.held_bytes(lengths, stage) for stage in range(5)) == COST.held_bytes(lengths, 0)


@given(LENGTHS, st.integers(1, 4096))
def test_time_when_a_sample_is_added_then_never_falls(lengths, more):
    assert both_s(COST, [*lengths, more]) > both_s(COST, lengths)


def test_time_when_tokens_are_one_sample_then_attention_shows():
    assert both_s(COST, [8192]) > 1.1 * both_s(COST, [512] * 16)


def test_time_when_the_microbatch_is_empty_then_none():
    assert COST.forward_s([], 0) == COST.backward_s([], 0) == COST.transfer_s(0) == COST.held_bytes([], 0) == 0


def test_last_stage_when_the_head_is_large_then_takes_longer():
    parts = replace(COST, num_stages=4)
    assert both_s(parts, [1024], 3) > 1.05 * both_s(parts, [1024], 2)
    assert both_s(parts, [1024], 1) == both_s(parts, [1024], 2)


def test_small_microbatch_when_run_then_reading_the_weights_bounds_it():
    one, sixteen = both_s(COST, [1]), both_s(COST, [16])
    assert sixteen < 1.1 * one
    assert one > 2 * 2 * LLAMA.num_layers * LLAMA.layer_weights / DEVICES["h200"].memory_rate


def test_fp8_when_the_device_multiplies_it_then_faster_and_else_slower():
    hopper, ampere = (AnalyticCost(LLAMA, DEVICES[name]) for name in ("h200", "a100-80"))
    assert both_s(replace(hopper, quantize="fp8"), [8192]) < 0.8 * both_s(hopper, [8192])
    for kind in ("fp8", "int8", "nf4"):
        assert both_s(replace(ampere, quantize=kind), [8192]) > 1.001 * both_s(ampere, [8192])


def test_recompute_when_chosen_then_backward_pays_what_it_runs_again():
    none, mlp, full = (replace(COST, recompute=mode) for mode in ("none", "mlp", "full"))
    assert none.backward_s([4096], 0) < mlp.backward_s([4096], 0) < full.backward_s([4096], 0)
    layers = replace(COST, shape=replace(LLAMA, vocabulary=1)).forward_s([4096], 0)
    assert full.backward_s([4096], 0) - none.backward_s([4096], 0) == pytest.approx(layers, rel=1e-3)


def test_tensor_parallel_when_doubled_then_faster_but_not_twice():
    two = replace(COST, tensor_parallel=2)
    assert both_s(COST, [8192]) / 2 < both_s(two, [8192]) < 0.75 * both_s(COST, [8192])


def test_tensor_parallel_when_links_are_slow_then_both_passes_wait_for_two_sums_a_layer():
    two = replace(COST, tensor_parallel=2)
    slow = replace(two, hardware=replace(two.hardware, link_rate=1e9))
    moved = 2 * 1024 * 4096 * 2 * 32
    for name in ("forward_s", "backward_s"):
        more = getattr(slow, name)([1024], 0) - getattr(two, name)([1024], 0)
        assert more == pytest.approx(moved / 1e9 - moved / two.hardware.link_rate)


def test_adapters_when_wider_or_more_then_cost_more_and_without_none():
    bare, narrow, wide = (replace(COST, rank=rank) for rank in (0, 8, 256))
    assert both_s(bare, [512] * 16) < both_s(narrow, [512] * 16) < both_s(wide, [512] * 16)
    assert both_s(narrow, [512] * 16) < both_s(replace(narrow, num_jobs=16), [512] * 16)
    assert both_s(replace(narrow, targets=("q_proj",)), [512] * 16) < both_s(narrow, [512] * 16)
    assert bare.step_s(0) == 0 < narrow.step_s(0) < wide.step_s(0)


def test_rows_when_tiled_then_the_last_tile_is_paid_whole():
    tiled = replace(COST, row_tile=2048)
    assert tiled.held_bytes([2049], 0) == COST.held_bytes([4096], 0)
    assert tiled.forward_s([1500], 0) > COST.forward_s([1500], 0)


def test_transfer_when_links_are_slower_then_longer():
    assert COST.transfer_s(8192) == pytest.approx(8192 * 4096 * 2 / DEVICES["h200"].link_rate)
    assert replace(COST, hardware=DEVICES["l40s"]).transfer_s(64) > 10 * COST.transfer_s(64)


def test_analytic_cost_when_targets_are_misspelt_then_refused():
    with pytest.raises(ConfigError, match="Did you mean down_proj"):
        replace(COST, targets=("down_porj",))
