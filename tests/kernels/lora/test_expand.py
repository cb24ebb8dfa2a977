"""What adapters add, from rank space back to activations."""

from __future__ import annotations

import pytest
import torch
from tables_fixture import BARE, NAN_SLOT, SLOTS, WIDE_SLOTS, one_site, plain_in, plain_out, rows_of

from weft.kernels.lora.expand import expand_grad_kernel, expand_grad_reference, expand_kernel, expand_reference

CASES = {"three": ((24, 8, 130), SLOTS), "two": ((20, 9), SLOTS), "one": ((7,), SLOTS), "wide": ((9, 8, 7), WIDE_SLOTS)}
FORWARD = [expand_reference, expand_kernel]
BACKWARD = [expand_grad_reference, expand_grad_kernel]


@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("run", FORWARD)
def test_expand_when_slots_differ_then_adds_each_rows_own_product(run, sizes, slots):
    """Every row gets its own owner's S Bᵀ and nothing else; rows without adapter keep their bits."""
    setting = one_site(sizes, 40, slots=slots)
    delta = setting.delta(setting.sites[0])
    before_TO = setting.random(128, sum(sizes))
    y_TO = before_TO.clone()
    run(y_TO, delta.s_TR, delta.site, delta.rows, delta.table)
    torch.testing.assert_close(y_TO.double(), before_TO + plain_out(delta), rtol=1e-5, atol=1e-5)
    assert y_TO[75:80].equal(before_TO[75:80])


@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("run", BACKWARD)
def test_expand_grad_when_slots_drop_then_adds_the_gradient_of_their_inputs(run, sizes, slots):
    """Every row gets Σ drop(dS A) of its own owner, which is the gradient of what `shrink` computed."""
    setting = one_site(sizes, 133, slots=slots)
    delta = setting.delta(setting.sites[0])
    before_TD = setting.random(128, 133)
    dx_TD = before_TD.clone()
    run(dx_TD, delta.s_TR, delta.site, delta.rows, delta.table)
    torch.testing.assert_close(dx_TD.double(), before_TD + plain_in(delta), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_expand_when_it_does_not_add_then_puts_its_part_everywhere(run, sizes, slots):
    """What was there is gone, NaN or not; rows and parts without adapter are zero."""
    setting = one_site(sizes, 40, slots=slots)
    delta = setting.delta(setting.sites[0])
    y = torch.full((128, sum(sizes) if run in FORWARD else 40), torch.nan)
    run(y, delta.s_TR, delta.site, delta.rows, delta.table, False)
    expected = (plain_out if run in FORWARD else plain_in)(delta)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert not y[75:80].any()


@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_expand_when_a_neighbour_is_nan_then_changes_no_bit_of_others(run):
    """NaN weights and rows of one slot stay in its own rows."""
    outs = []
    for nan_slot in (BARE, NAN_SLOT):
        torch.manual_seed(5)
        setting = one_site((24, 16, 8), 48, nan_slot=nan_slot)
        delta = setting.delta(setting.sites[0])
        if nan_slot:
            delta.s_TR[rows_of(NAN_SLOT)] = torch.nan
        outs.append(setting.random(128, 48))
        run(outs[-1], delta.s_TR, delta.site, delta.rows, delta.table)
    mine_T = ~rows_of(NAN_SLOT)
    assert outs[0][mine_T].equal(outs[1][mine_T])
    assert outs[0][mine_T].isfinite().all() and outs[1][rows_of(NAN_SLOT)].isnan().any()


def test_expand_kernel_when_fp16_then_rounds_the_sum_once():
    """In half precision the result is the reference's to the last digit or so."""
    setting = one_site((24, 8), 40, dtype=torch.float16)
    delta = setting.delta(setting.sites[0])
    y_TO = setting.random(128, 32)
    expected_TO = (y_TO.double() + plain_out(delta)).half()
    expand_kernel(y_TO, delta.s_TR, delta.site, delta.rows, delta.table)
    torch.testing.assert_close(y_TO, expected_TO, rtol=1e-3, atol=1e-3)


def test_expand_grad_kernel_when_rows_do_not_drop_then_nothing_is_dropped():
    setting = one_site((24, 8), 40, drops=False)
    delta = setting.delta(setting.sites[0])
    mine, theirs = torch.zeros(128, 40), torch.zeros(128, 40)
    for run, dx_TD in ((expand_grad_kernel, mine), (expand_grad_reference, theirs)):
        run(dx_TD, delta.s_TR, delta.site, delta.rows, delta.table)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
