"""The gated activation that comes with its rows in FP8: nothing but its two steps in one."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.layers import rounded_swiglu
from weft.kernels.layers.rounded_swiglu import rounded_swiglu_grad_kernel, rounded_swiglu_kernel
from weft.kernels.layers.swiglu import swiglu_grad_kernel, swiglu_kernel
from weft.kernels.storage.fp8 import Rows8, quantise_rows_kernel

DTYPES = [torch.float32, torch.float16]
NUM_ROWS, NUM_INNER = 9, 72


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_swiglu_when_run_then_has_the_bits_of_its_two_steps(dtype):
    gu_TJ, _, _ = inputs(dtype)
    act_TI, act8 = rounded_swiglu_kernel(gu_TJ)
    assert act_TI.equal(swiglu_kernel(gu_TJ))
    assert_same(act8, quantise_rows_kernel(act_TI))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("want_act", [False, True])
def test_rounded_swiglu_grad_when_run_then_has_the_bits_of_its_two_steps(dtype, want_act):
    """Also of the act that is made again; the gradient lies in gu's place."""
    gu_TJ, dact_TI, columns_J = inputs(dtype)
    expected_TJ, expected_TI = swiglu_grad_kernel(gu_TJ.clone(), dact_TI, want_act)
    dgu_TJ, act_TI, dgu8 = rounded_swiglu_grad_kernel(gu_TJ, dact_TI, want_act, columns_J)
    assert dgu_TJ is gu_TJ and dgu_TJ.equal(expected_TJ)
    assert (act_TI is not None) == want_act
    assert act_TI is None or (expected_TI is not None and act_TI.equal(expected_TI))
    assert_same(dgu8, quantise_rows_kernel(dgu_TJ, columns_J))


def test_rounded_swiglu_when_a_neighbour_is_nan_then_changes_no_bit_of_others():
    healthy = inputs()
    sick = inputs()
    sick[0][3] = torch.nan
    ones = torch.arange(NUM_ROWS) != 3
    outs = [rounded_swiglu_kernel(gu_TJ)[1] for gu_TJ, _, _ in (healthy, sick)]
    outs += [rounded_swiglu_grad_kernel(gu, dact, True, columns)[2] for gu, dact, columns in (healthy, sick)]
    for without, beside in zip(outs[::2], outs[1::2], strict=True):
        assert_same(Rows8(without.q_TK[ones], without.scale_T[ones]), Rows8(beside.q_TK[ones], beside.scale_T[ones]))
        assert without.scale_T.isfinite().all() and beside.scale_T[3].isnan()


def test_rounded_swiglu_when_rows_are_too_long_to_be_held_then_takes_the_two_steps(monkeypatch):
    """The choice is one of speed: both ways have the same bits."""
    held, (gu_TJ, _, _) = [], inputs()
    monkeypatch.setattr(rounded_swiglu, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(rounded_swiglu, "has_fp8", lambda device: True)
    monkeypatch.setattr(rounded_swiglu, "rounded_swiglu_kernel", lambda gu_TJ: held.append(gu_TJ.shape[1]))
    rounded_swiglu.rounded_swiglu(gu_TJ)
    monkeypatch.setattr(rounded_swiglu, "LONGEST", NUM_INNER - 1)
    rounded_swiglu.rounded_swiglu(gu_TJ)
    assert held == [2 * NUM_INNER]
