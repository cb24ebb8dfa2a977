"""The residual sum and its RMS norm."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from weft.kernels.layers.rms_norm import (
    add_norm,
    add_norm_kernel,
    add_norm_reference,
    norm_grad_kernel,
    norm_grad_reference,
)

EPS = 1e-5
FORWARD = [add_norm_reference, add_norm_kernel]
BACKWARD = [norm_grad_reference, norm_grad_kernel]
SIZES = [20, 300]
"""Less than one block of columns, and more than one."""


def plain_norm(x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return x_TD * torch.rsqrt(x_TD.square().mean(1, keepdim=True) + EPS) * weight_D


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", FORWARD)
def test_add_norm_when_run_then_gives_the_sum_and_its_norm(run, size):
    """x2 = x + y and h = norm(x2) · w, as in fp64."""
    x_TD, y_TD, weight_D = torch.randn(37, size), torch.randn(37, size), torch.randn(size)
    x2_TD, h_TD = run(x_TD, y_TD, weight_D, EPS)
    expected_TD = x_TD.double() + y_TD.double()
    torch.testing.assert_close(x2_TD.double(), expected_TD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h_TD.double(), plain_norm(expected_TD, weight_D.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", FORWARD)
def test_add_norm_when_nothing_is_added_then_keeps_x_itself(run):
    """Without y the sum is x, not a copy."""
    x_TD, weight_D = torch.randn(5, 33), torch.randn(33)
    x2_TD, h_TD = run(x_TD, None, weight_D, EPS)
    assert x2_TD is x_TD
    torch.testing.assert_close(h_TD, plain_norm(x_TD, weight_D))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_add_norm_twin_when_run_then_has_the_bits_of_hugging_face(dtype):
    """The norm rounds where LlamaRMSNorm rounds."""
    norm = LlamaRMSNorm(48, EPS).to(dtype)
    norm.weight.data.normal_()
    x_TD = torch.randn(64, 48).to(dtype)
    assert add_norm(x_TD, None, norm.weight.data, EPS)[1].equal(norm(x_TD).detach())


def test_add_norm_kernel_when_fp16_then_rounds_as_its_twin():
    """In half precision kernel and twin agree to the last digit or so."""
    tensors = torch.randn(37, 40).half(), torch.randn(37, 40).half(), torch.randn(40).half()
    for mine, twin in zip(add_norm_kernel(*tensors, EPS), add_norm_reference(*tensors, EPS), strict=True):
        assert mine.dtype == torch.float16
        torch.testing.assert_close(mine, twin, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("more", [False, True], ids=["alone", "with residual and h"])
@pytest.mark.parametrize("run", BACKWARD)
def test_norm_grad_when_run_then_equals_autograd(run, more, size):
    """dx is the gradient of the norm by x, plus what went around; h is the norm's output."""
    x_TD, weight_D, dh_TD, dres_TD = (torch.randn(*s) for s in ((37, size), (size,), (37, size), (37, size)))
    dx_TD, h_TD = run(x_TD, weight_D, EPS, dh_TD, dres_TD if more else None, more)
    leaf_TD = x_TD.double().requires_grad_()
    out_TD = plain_norm(leaf_TD, weight_D.double())
    (expected_TD,) = torch.autograd.grad(out_TD, leaf_TD, dh_TD.double())
    expected_TD = expected_TD + dres_TD.double() if more else expected_TD
    torch.testing.assert_close(dx_TD.double(), expected_TD, rtol=1e-5, atol=2e-5)
    assert (h_TD is not None) == more
    if h_TD is not None:
        torch.testing.assert_close(h_TD.double(), out_TD.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_norms_when_a_neighbour_is_nan_then_change_no_bit_of_others(run):
    """NaN rows stay by themselves, even where one program holds several rows."""
    x_TD, y_TD, weight_D = torch.randn(40, 20), torch.randn(40, 20), torch.randn(20)
    outs = []
    for poison in (False, True):
        if poison:
            x_TD[7], y_TD[7] = torch.nan, torch.nan
        if run in FORWARD:
            outs.append(torch.cat(run(x_TD, y_TD, weight_D, EPS), dim=1))
        else:
            outs.append(torch.cat(run(x_TD, weight_D, EPS, y_TD, y_TD, True), dim=1))
    mine_T = torch.arange(40) != 7
    assert outs[0][mine_T].equal(outs[1][mine_T])
    assert outs[0].isfinite().all() and outs[1][7].isnan().all()
