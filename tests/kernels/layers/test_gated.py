"""The gated activation and its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.kernels.layers.gated import gated_grad_kernel, gated_grad_reference, gated_kernel, gated_reference
from weft.plan.decoder import Activation

FORWARD = [gated_reference, gated_kernel]
BACKWARD = [gated_grad_reference, gated_grad_kernel]
every_activation = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
SHAPES = [(100, 70), (3, 600)]
"""Rows and inner size: more than one block of rows, of columns, and more than one program's columns; none full."""


def inputs(num_rows: int, num_inner: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """gu and dact, both parts of wider tensors."""
    torch.manual_seed(5)
    gu_TJ = torch.randn(num_rows, 2 * num_inner + 8).to(dtype)[:, : 2 * num_inner]
    return gu_TJ, torch.randn(num_rows, num_inner + 3).to(dtype)[:, :num_inner]


def plain(gu_TJ: torch.Tensor, activation: Activation) -> torch.Tensor:
    g_TI, u_TI = gu_TJ.chunk(2, dim=1)
    return (F.silu(g_TI) if activation == "silu" else F.gelu(g_TI, approximate="tanh")) * u_TI


@every_activation
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("run", FORWARD)
def test_gated_when_run_then_gates_one_half_by_the_other(run, shape, activation):
    """act = f(g) · u, and gu keeps every bit."""
    gu_TJ, _ = inputs(*shape)
    before_TJ = gu_TJ.clone()
    act_TI = run(gu_TJ, activation)
    torch.testing.assert_close(act_TI.double(), plain(gu_TJ.double(), activation), rtol=1e-5, atol=1e-5)
    assert gu_TJ.equal(before_TJ)


@every_activation
@pytest.mark.parametrize("want_act", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("run", BACKWARD)
def test_gated_grad_when_run_then_equals_autograd(run, shape, want_act, activation):
    """dgu is the gradient of f(g) · u under dact, in gu's place; act comes with it where it is wanted."""
    gu_TJ, dact_TI = inputs(*shape)
    leaf_TJ = gu_TJ.double().requires_grad_()
    out_TI = plain(leaf_TJ, activation)
    (expected_TJ,) = torch.autograd.grad(out_TI, leaf_TJ, dact_TI.double())
    dgu_TJ, act_TI = run(gu_TJ, dact_TI, want_act, activation)
    torch.testing.assert_close(dgu_TJ.double(), expected_TJ, rtol=1e-5, atol=2e-5)
    assert dgu_TJ is gu_TJ
    assert (act_TI is not None) == want_act
    if act_TI is not None:
        torch.testing.assert_close(act_TI.double(), out_TI.detach(), rtol=1e-5, atol=1e-5)


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("forward", "backward"), list(zip(FORWARD, BACKWARD, strict=True)))
def test_gated_grad_when_it_makes_act_again_then_it_has_the_forwards_bits(forward, backward, dtype, activation):
    """The act the gradients of A see is the one the down projection saw."""
    gu_TJ, dact_TI = inputs(*SHAPES[0], dtype)
    act_TI = forward(gu_TJ, activation)
    assert backward(gu_TJ, dact_TI, True, activation)[1].equal(act_TI)


@every_activation
def test_gated_kernels_when_fp16_then_round_as_their_references(activation):
    """In half precision kernel and reference agree to the last digit or so."""
    gu_TJ, dact_TI = inputs(*SHAPES[0], torch.float16)
    torch.testing.assert_close(*(run(gu_TJ, activation) for run in FORWARD), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        *(run(gu_TJ.clone(), dact_TI, False, activation)[0] for run in BACKWARD), rtol=1e-3, atol=1e-5
    )


@every_activation
@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_gated_when_a_neighbour_is_nan_then_changes_no_bit_of_others(run, activation):
    """NaN rows stay what they are, and reach no other."""
    outs, sick = [], slice(60, 70)
    for is_sick in (False, True):
        gu_TJ, dact_TI = inputs(*SHAPES[0])
        if is_sick:
            gu_TJ[sick] = torch.nan
        outs.append(run(gu_TJ, activation) if run in FORWARD else run(gu_TJ, dact_TI, False, activation)[0])
    mine_T = torch.ones(len(outs[0]), dtype=torch.bool)
    mine_T[sick] = False
    assert outs[0][mine_T].equal(outs[1][mine_T])
    assert outs[0].isfinite().all() and outs[1][sick].isnan().all()
