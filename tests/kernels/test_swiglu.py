"""The gated activation, with adapters on gate, up and down."""

from __future__ import annotations

import pytest
import torch
from tables_fixture import BARE, NAN_SLOT, Setting, build, plain_in, plain_out, rows_of

from weft.kernels.swiglu import swiglu_grad_kernel, swiglu_grad_reference, swiglu_kernel, swiglu_reference
from weft.kernels.tables import Delta, Site

FORWARD = [swiglu_reference, swiglu_kernel]
BACKWARD = [swiglu_grad_reference, swiglu_grad_kernel]
INNER = 70
"""More than one block of columns, the last one not full."""


def mlp(**options: object) -> tuple[Setting, Delta, Delta]:
    """A setting with gate and up as two modules or as one, S of theirs and dS of the down projection's."""
    first = Site(0, (INNER, INNER), 24)
    setting = build((first, Site(2, (24,), INNER)), **options)  # type: ignore[arg-type]
    return setting, setting.delta(setting.sites[0]), setting.delta(setting.sites[1])


def plain(gu_TJ: torch.Tensor) -> torch.Tensor:
    g_TI, u_TI = gu_TJ.chunk(2, dim=1)
    return torch.nn.functional.silu(g_TI) * u_TI


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapted"])
@pytest.mark.parametrize("run", FORWARD)
def test_swiglu_when_run_then_gates_the_sum_of_product_and_adapters(run, adapted):
    """act = silu(g) · u with both halves' S Bᵀ, and gu keeps every bit."""
    setting, delta, _ = mlp()
    gu_TJ = setting.random(128, 2 * INNER)
    before_TJ = gu_TJ.clone()
    act_TI = run(gu_TJ, delta if adapted else None)
    expected_TI = plain(gu_TJ.double() + (plain_out(delta) if adapted else 0.0))
    torch.testing.assert_close(act_TI.double(), expected_TI, rtol=1e-5, atol=1e-5)
    assert gu_TJ.equal(before_TJ)


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapted"])
@pytest.mark.parametrize("run", BACKWARD)
def test_swiglu_grad_when_run_then_equals_autograd(run, adapted):
    """dgu is the gradient of silu(g) · u under dact and what the down projection's adapters add, in gu's place."""
    setting, delta, down_delta = mlp()
    gu_TJ, dact_TI = setting.random(128, 2 * INNER), setting.random(128, INNER)
    written_TJ = gu_TJ.clone()
    dgu_TJ, act_TI = run(written_TJ, delta if adapted else None, dact_TI, down_delta if adapted else None, adapted)
    leaf_TJ = (gu_TJ.double() + (plain_out(delta) if adapted else 0.0)).requires_grad_()
    out_TI = plain(leaf_TJ)
    d_TI = dact_TI.double() + (plain_in(down_delta) if adapted else 0.0)
    (expected_TJ,) = torch.autograd.grad(out_TI, leaf_TJ, d_TI)
    torch.testing.assert_close(dgu_TJ.double(), expected_TJ, rtol=1e-5, atol=2e-5)
    assert dgu_TJ is written_TJ
    assert (act_TI is not None) == adapted
    if act_TI is not None:
        torch.testing.assert_close(act_TI.double(), out_TI.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("forward", "backward"), list(zip(FORWARD, BACKWARD, strict=True)))
def test_swiglu_grad_when_it_makes_act_again_then_it_has_the_forwards_bits(forward, backward, dtype):
    """The act the gradients of A see is the one the down projection saw."""
    setting, delta, down_delta = mlp(dtype=dtype)
    gu_TJ = setting.random(128, 2 * INNER)
    act_TI = forward(gu_TJ, delta)
    assert backward(gu_TJ, delta, setting.random(128, INNER), down_delta, True)[1].equal(act_TI)


def test_swiglu_kernels_when_fp16_then_round_as_their_twins():
    """In half precision kernel and twin agree to the last digit or so."""
    setting, delta, down_delta = mlp(dtype=torch.float16)
    gu_TJ, dact_TI = setting.random(128, 2 * INNER), setting.random(128, INNER)
    torch.testing.assert_close(*(run(gu_TJ, delta) for run in FORWARD), rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(
        *(run(gu_TJ.clone(), delta, dact_TI, down_delta, False)[0] for run in BACKWARD), rtol=4e-3, atol=4e-3
    )


@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_swiglu_when_a_neighbour_is_nan_then_changes_no_bit_of_others(run):
    """NaN weights and rows of one slot stay in its own rows."""
    outs = []
    for nan_slot in (BARE, NAN_SLOT):
        torch.manual_seed(5)
        setting, delta, down_delta = mlp(nan_slot=nan_slot)
        gu_TJ, dact_TI = setting.random(128, 2 * INNER), setting.random(128, INNER)
        if nan_slot:
            gu_TJ[rows_of(NAN_SLOT)] = torch.nan
        outs.append(run(gu_TJ, delta) if run in FORWARD else run(gu_TJ, delta, dact_TI, down_delta, False)[0])
    mine_T = ~rows_of(NAN_SLOT)
    assert outs[0][mine_T].equal(outs[1][mine_T])
    assert outs[0].isfinite().all() and outs[1][rows_of(NAN_SLOT)].isnan().all()


def test_swiglu_grad_kernel_when_rows_do_not_drop_then_nothing_is_dropped():
    setting, delta, down_delta = mlp(drops=False)
    gu_TJ, dact_TI = setting.random(128, 2 * INNER), setting.random(128, INNER)
    mine, theirs = (run(gu_TJ.clone(), delta, dact_TI, down_delta, True)[0] for run in reversed(BACKWARD))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)
