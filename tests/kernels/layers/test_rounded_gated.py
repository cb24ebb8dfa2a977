"""The gated activation that comes with its rows in FP8: nothing but its two steps in one."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.layers import gated
from weft.kernels.layers.gated import gated_grad_kernel, gated_kernel, rounded_gated_grad_kernel, rounded_gated_kernel
from weft.kernels.storage import Rows8, quantise_rows_kernel

DTYPES = [torch.float32, torch.float16]
NUM_ROWS, NUM_INNER = 9, 72
every_activation = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gu and dact, both parts of wider tensors, and factors of gu's columns; a row of zeros among them."""
    torch.manual_seed(6)
    gu_TJ = torch.randn(NUM_ROWS, 2 * NUM_INNER + 8).to(dtype)[:, : 2 * NUM_INNER]
    dact_TI = torch.randn(NUM_ROWS, NUM_INNER + 3).to(dtype)[:, :NUM_INNER]
    gu_TJ[4], dact_TI[4] = 0, 0
    return gu_TJ, dact_TI, torch.rand(2 * NUM_INNER) + 0.1


def assert_same(found: Rows8, expected: Rows8) -> None:
    assert found.q_TK.view(torch.uint8).equal(expected.q_TK.view(torch.uint8))
    assert found.scale_T.equal(expected.scale_T)


@every_activation
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_gated_when_run_then_has_the_bits_of_its_two_steps(dtype, activation):
    gu_TJ, _, _ = inputs(dtype)
    act_TI, act8 = rounded_gated_kernel(gu_TJ, activation)
    assert act_TI.equal(gated_kernel(gu_TJ, activation))
    assert_same(act8, quantise_rows_kernel(act_TI))


@every_activation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("want_act", [False, True])
def test_rounded_gated_grad_when_run_then_has_the_bits_of_its_two_steps(dtype, want_act, activation):
    """Also of the act that is made again; the gradient lies in gu's place."""
    gu_TJ, dact_TI, columns_J = inputs(dtype)
    expected_TJ, expected_TI = gated_grad_kernel(gu_TJ.clone(), dact_TI, want_act, activation)
    dgu_TJ, act_TI, dgu8 = rounded_gated_grad_kernel(gu_TJ, dact_TI, want_act, columns_J, activation)
    assert dgu_TJ is gu_TJ and dgu_TJ.equal(expected_TJ)
    assert (act_TI is not None) == want_act
    assert act_TI is None or (expected_TI is not None and act_TI.equal(expected_TI))
    assert_same(dgu8, quantise_rows_kernel(dgu_TJ, columns_J))


def test_rounded_gated_when_a_neighbour_is_nan_then_changes_no_bit_of_others():
    healthy = inputs()
    sick = inputs()
    sick[0][3] = torch.nan
    ones = torch.arange(NUM_ROWS) != 3
    outs = [rounded_gated_kernel(gu_TJ, "silu")[1] for gu_TJ, _, _ in (healthy, sick)]
    outs += [rounded_gated_grad_kernel(gu, dact, True, columns, "silu")[2] for gu, dact, columns in (healthy, sick)]
    for without, beside in zip(outs[::2], outs[1::2], strict=True):
        assert_same(Rows8(without.q_TK[ones], without.scale_T[ones]), Rows8(beside.q_TK[ones], beside.scale_T[ones]))
        assert without.scale_T.isfinite().all() and beside.scale_T[3].isnan()


def test_rounded_gated_when_rows_are_too_long_to_be_held_then_takes_the_two_steps(monkeypatch):
    """The choice is one of speed: both ways have the same bits."""
    held, (gu_TJ, _, _) = [], inputs()
    monkeypatch.setattr(gated, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(gated, "has_fp8", lambda device: True)
    monkeypatch.setattr(gated, "rounded_gated_kernel", lambda gu_TJ, _: held.append(gu_TJ.shape[1]))
    gated.rounded_gated(gu_TJ, "silu")
    monkeypatch.setattr(gated, "LONGEST", NUM_INNER - 1)
    gated.rounded_gated(gu_TJ, "silu")
    assert held == [2 * NUM_INNER]
