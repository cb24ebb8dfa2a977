"""What packs and lone configurations cost agrees with the cost models, with our measurements and with PLoRA's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_cases import PEER, sweeps

from benchmarks.sweeps.parts import QWEN25
from weft.plan.cost.hardware import DEVICES
from weft.plan.cost.shape import ModelShape
from weft.plan.sweep import Configuration
from weft.plan.sweep.bounds import LAYER_LAUNCH_S, Solo, one_by_one_s
from weft.plan.sweep.cost import PackCost, SweepSetting

LLAMA = ModelShape("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256)
TINYLLAMA = ModelShape("tinyllama-1.1b", 2048, 5632, 22, 32, 4, 64, 32000)


@pytest.mark.parametrize(
    ("shape", "num_jobs", "length", "packed", "alone"),
    [(LLAMA, 16, 512, 18362, 2328), (LLAMA, 32, 256, 18029, 958), (TINYLLAMA, 16, 256, 98358, 1731)],
)
def test_pack_when_measured_on_an_h200_then_predicted_within_a_tenth_and_peft_never_slower(
    shape, num_jobs, length, packed, alone
):
    sweep = [Configuration(f"c{i}", 16, 1, 100, length) for i in range(num_jobs)]
    setting = SweepSetting(shape, DEVICES["h200"])
    cost = PackCost(sweep, setting)
    tokens = sum(c.num_tokens for c in sweep)
    assert tokens / cost.price(cost.kind_of, 1)[0] == pytest.approx(packed, rel=0.1)
    assert tokens / one_by_one_s(sweep, setting) >= 0.99 * alone


def test_pack_when_one_kind_fills_microbatches_then_costs_what_the_model_predicts_for_each():
    setting = SweepSetting(PEER, DEVICES["a100-40"], capacity=4096, recompute="none")
    (kind,) = PackCost([Configuration("c", 32, 4, 10, 1024)], setting).ways
    cost = PackCost([Configuration("c", 32, 4, 10, 1024)], setting)
    step = setting.step_cost(kind, Configuration("c", 32, 4, 10, 1024))
    each = step.forward_s([1024] * 4, 0) + step.backward_s([1024] * 4, 0) + step.step_s(0)
    assert cost.price([0], 1)[0] == pytest.approx(10 * each)


def test_pack_when_it_is_evaluated_then_costs_the_forward_passes_too_and_so_does_peft():
    setting = SweepSetting(PEER, DEVICES["a100-40"], capacity=4096, recompute="none")
    without, with_evals = (Configuration("c", 32, 4, 10, 1024, forward_tokens=n) for n in (0, 20 * 4096))
    (way,) = PackCost([without], setting).ways
    passes = 20 * setting.step_cost(way, without).forward_s([1024] * 4, 0)
    packed, evaluated = (PackCost([c], setting).price([0], 1)[0] for c in (without, with_evals))
    assert evaluated - packed == pytest.approx(passes, rel=0.02)
    alone, longer = (one_by_one_s([c], setting) for c in (without, with_evals))
    assert longer - alone > evaluated - packed


@settings(max_examples=15, deadline=None)
@given(sweeps(most=6, most_gpus=2), st.randoms(use_true_random=False))
def test_price_when_kinds_are_shuffled_then_stays_the_same(case, random):
    configurations, setting = case
    cost = PackCost(configurations, setting)
    kinds = list(cost.kind_of)
    whole = cost.price(kinds, 1)[0]
    random.shuffle(kinds)
    assert cost.price(kinds, 1)[0] == pytest.approx(whole)
    assert [cost.price(kinds[: n + 1], 1)[0] for n in range(len(kinds))] == pytest.approx(cost.prefixes(kinds, 1)[0])


@settings(max_examples=15, deadline=None)
@given(sweeps(most=6, most_gpus=2))
def test_price_when_a_pack_has_one_then_some_way_holds_it_and_else_none_does(case):
    configurations, setting = case
    cost = PackCost(configurations, setting)
    for degree in setting.degrees:
        seconds, _ = cost.prefixes(cost.kind_of, degree)
        for n, price in enumerate(seconds, start=1):
            kinds = cost.kind_of[:n]
            ways = [way for way in cost.ways if way.degree == degree]
            fits = any(cost.gpu_bytes(kinds, way) <= setting.usable_bytes for way in ways)
            assert fits == (price < float("inf"))


@pytest.mark.parametrize(("size", "gpus"), [("3b", 1), ("7b", 1), ("14b", 2), ("32b", 4)])
def test_solo_when_on_a100_40g_then_needs_as_many_gpus_as_plora_reports(size, gpus):
    solo = Solo(SweepSetting(QWEN25[size], DEVICES["a100-40"], 8))
    found = [solo.cheapest(Configuration("c", rank, 1, 1, 1024)) for rank in (8, 32, 64)]
    assert [way and way[0] for way in found] == [gpus] * 3


def test_solo_when_a_large_model_has_short_samples_then_takes_the_gpus_that_cost_least():
    """14B holds one sample of 434 tokens on one GPU; a batch of 32 is cheaper on two, in fewer passes."""
    solo = Solo(SweepSetting(QWEN25["14b"], DEVICES["a100-40"], 8))
    job = Configuration("c", 32, 32, 1, 152, 434)
    assert solo.gpu_bytes(job, 1, 1) <= solo.setting.usable_bytes < solo.gpu_bytes(job, 1, 2)
    assert solo.cheapest(job) == (2, solo.seconds(job, 2))
    assert 2 * solo.seconds(job, 2) < solo.seconds(job, 1)


def test_solo_when_samples_are_short_then_eight_cost_little_more_than_one_as_plora_reports():
    solo = Solo(SweepSetting(PEER, DEVICES["a100-40"]))
    one, eight = (solo.seconds(Configuration("c", 64, batch, 1, 60), 1) for batch in (1, 8))
    assert one == pytest.approx(28 * LAYER_LAUNCH_S, rel=0.1)
    assert 1.0 <= eight / one <= 1.1


def test_solo_when_the_batch_does_not_fit_then_runs_in_several_microbatches():
    solo = Solo(SweepSetting(PEER, DEVICES["a100-40"]))
    one, many = (solo.seconds(Configuration("c", 64, batch, 1, 1024), 1) for batch in (1, 32))
    assert 25 * one < many < 32 * one


def test_one_by_one_when_gpus_double_then_takes_half_and_none_where_nothing_fits():
    sweep = [Configuration(f"c{i}", 8, 1, 10, 1024) for i in range(8)]
    two, four = (one_by_one_s(sweep, SweepSetting(PEER, DEVICES["a100-40"], gpus)) for gpus in (2, 4))
    assert two == pytest.approx(2 * four)
    assert one_by_one_s(sweep, SweepSetting(QWEN25["32b"], DEVICES["a100-40"], 2)) is None
