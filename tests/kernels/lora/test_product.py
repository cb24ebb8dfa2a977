"""A frozen product with the adapters' part in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import slow
from tables_fixture import BARE, NAN_SLOT, SLOTS, WIDE_SLOTS, one_site, plain_in, plain_out, rows_of

from weft.kernels.lora import product, step, tables
from weft.kernels.lora.product import (
    Factors,
    fits,
    product_grad_kernel,
    product_grad_reference,
    product_kernel,
    product_reference,
)
from weft.kernels.lora.shrink import shrink_reference
from weft.kernels.lora.step import step_product_kernel
from weft.kernels.lora.tables import Site
from weft.kernels.storage import quantise_rows

CASES = {
    "three": ((32, 64, 32), SLOTS),
    "one": ((40,), SLOTS),
    "wide": ((32, 32), WIDE_SLOTS),
}
FORWARD = [product_reference, product_kernel]
BACKWARD = [product_grad_reference, product_grad_kernel]


@pytest.fixture(autouse=True, params=[32, slow(128)])
def small_blocks(request, monkeypatch):
    """Blocks small enough for the interpreter; those of 32 rows end inside samples, the one of 128 holds them all."""
    for module in (product, step, tables):
        monkeypatch.setattr(module, "ROW_BLOCK", request.param)
    monkeypatch.setattr(product, "BLOCKS", {"BN": 32, "num_warps": 4, "num_stages": 2})
    monkeypatch.setattr(product, "STEP_BYTES", 64)
    monkeypatch.setattr(product, "_group", lambda num_summed: 3)


@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("run", FORWARD)
def test_product_when_slots_differ_then_each_row_gets_its_own_owners_part(run, sizes, slots):
    """y is x Wᵀ everywhere, plus S Bᵀ of the row's owner where it has one; edges of no block are touched."""
    setting = one_site(sizes, 40, slots=slots)
    delta = setting.delta(setting.sites[0])
    x_TD, weight_OD = setting.random(128, 40), setting.random(sum(sizes), 40)
    y_TO = run(Factors(x_TD, weight_OD), delta.s_TR, delta.site, delta.rows, delta.table)
    expected_TO = x_TD.double() @ weight_OD.double().t() + plain_out(delta)
    torch.testing.assert_close(y_TO.double(), expected_TO, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small_blocks", [128], indirect=True)
@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
def test_step_product_when_slots_differ_then_each_row_gets_what_training_gives_it(
    small_blocks, sizes, slots, monkeypatch
):
    monkeypatch.setattr(step, "SUMS", {128: {32: step.SUMS[128][32]}})
    monkeypatch.setattr(step, "PARTS", {**step.PARTS, "BN": 32})
    setting = one_site(sizes, 40, slots=slots)
    site, rows = setting.sites[0], replace(setting.rows, drops=False)
    x_TD = setting.random(128, 40)
    factors = Factors(x_TD, setting.random(sum(sizes), 40))
    s_TR = setting.random(128, len(sizes) * setting.table.rank_class)
    shrink_reference(x_TD, s_TR, site, rows, setting.table)
    y_TO = step_product_kernel(x_TD, factors, site, rows, setting.table)
    torch.testing.assert_close(y_TO, product_reference(factors, s_TR, site, rows, setting.table), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("run", BACKWARD)
def test_product_grad_when_slots_drop_then_each_row_gets_the_gradient_of_its_input(run, sizes, slots):
    """dx is dy W everywhere, plus Σ drop(dS A) of the row's owner."""
    setting = one_site(sizes, 72, slots=slots)
    delta = setting.delta(setting.sites[0])
    dy_TO, weight_OD = setting.random(128, sum(sizes)), setting.random(sum(sizes), 72)
    dx_TD = run(Factors(dy_TO, weight_OD.t()), delta.s_TR, delta.site, delta.rows, delta.table)
    expected_TD = dy_TO.double() @ weight_OD.double() + plain_in(delta)
    torch.testing.assert_close(dx_TD.double(), expected_TD, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_product_when_factors_are_8_bit_floats_then_scales_the_sums_alone(run):
    """Scales touch the frozen sums before the adapters' part is added; the gradient has those of its weight in dy."""
    setting = one_site((32, 32), 64)
    delta = setting.delta(setting.sites[0])
    x_TK, scale_T = quantise_rows(setting.random(128, 64))
    w_NK, scale_N = quantise_rows(setting.random(64, 64))
    factors = Factors(x_TK, w_NK, scale_T, scale_N if run in FORWARD else None)
    found = run(factors, delta.s_TR, delta.site, delta.rows, delta.table)
    frozen = (x_TK.double() * scale_T[:, None].double()) @ w_NK.double().t()
    frozen *= scale_N.double() if run in FORWARD else 1.0
    expected = frozen + (plain_out if run in FORWARD else plain_in)(delta)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_product_when_a_neighbour_is_nan_then_changes_no_bit_of_others(run):
    """NaN weights and rows of one slot stay in its own rows, in the same block or not."""
    outs = []
    for nan_slot in (BARE, NAN_SLOT):
        torch.manual_seed(5)
        setting = one_site((32, 32), 64, nan_slot=nan_slot)
        delta = setting.delta(setting.sites[0])
        x, weight_OD = setting.random(128, 64), setting.random(64, 64)
        if nan_slot:
            delta.s_TR[rows_of(NAN_SLOT)] = torch.nan
        outs.append(run(Factors(x, weight_OD), delta.s_TR, delta.site, delta.rows, delta.table))
    mine_T = ~rows_of(NAN_SLOT)
    assert outs[0][mine_T].equal(outs[1][mine_T])
    assert outs[0].isfinite().all() and outs[1][rows_of(NAN_SLOT)].isnan().any()


def test_product_when_there_is_no_gpu_then_does_not_fit():
    """Without Hopper's copy engine the library's product with `expand` is faster."""
    site = Site(0, (512, 256), 64)
    assert not fits(site, torch.zeros(1, dtype=torch.bfloat16), backward=False)


def test_product_when_blocks_would_cross_parts_then_fits_backward_alone(monkeypatch):
    """A block of outputs belongs to one part; the gradient's blocks are of inputs."""
    monkeypatch.setattr(product, "runs_triton", lambda like: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    like = torch.zeros(1, dtype=torch.bfloat16)
    crossing, whole = Site(0, (48, 32), 64), Site(0, (64, 32), 64)
    assert fits(whole, like, backward=False) and fits(whole, like, backward=True)
    assert not fits(crossing, like, backward=False) and fits(crossing, like, backward=True)
    assert fits(Site(0, (48,), 64), like, backward=False)
    assert not fits(Site(0, (48,), 56), like, backward=True)
    assert not fits(whole, like.half(), backward=True)


def test_product_grad_kernel_when_rows_do_not_drop_then_nothing_is_dropped():
    setting = one_site((40,), 72, drops=False)
    delta = setting.delta(setting.sites[0])
    factors = Factors(setting.random(128, 40), setting.random(40, 72).t())
    mine, theirs = (run(factors, delta.s_TR, delta.site, delta.rows, delta.table) for run in reversed(BACKWARD))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)
