"""The residual sum and its RMS norm."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from weft.kernels.layers.rms_norm import (
    RmsNorm,
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


every_form = pytest.mark.parametrize("rounds_first", [True, False], ids=["factor", "one plus"])
every_post = pytest.mark.parametrize("posts", [False, True], ids=["as it is", "normed"])


def test_add_norm_when_only_what_is_added_is_normed_then_the_sum_is_the_result():
    """In families that norm only the results of blocks; the gradient goes around."""
    x_TD, y_TD, dh_TD, dres_TD, post = *(torch.randn(37, 40) for _ in range(4)), random_norm(40, False)
    for forward, backward in zip(FORWARD, BACKWARD, strict=True):
        x2_TD, h_TD = forward(x_TD, y_TD, None, post)
        assert h_TD is x2_TD
        assert forward(x_TD, None, None, None) == (x_TD, x_TD)
        torch.testing.assert_close(x2_TD, x_TD + plain_norm(y_TD, post), rtol=1e-5, atol=1e-5)
        found = backward(x2_TD, None, dh_TD, dres_TD, True, (y_TD, post))
        assert found.h_TD is x2_TD and found.dx_TD.equal(dh_TD + dres_TD)
        leaf_TD = y_TD.double().requires_grad_()
        (expected_TD,) = torch.autograd.grad(plain_norm(leaf_TD, post), leaf_TD, (dh_TD + dres_TD).double())
        torch.testing.assert_close(found.dy_TD.double(), expected_TD, rtol=1e-5, atol=1e-4)
        assert backward(x_TD, None, dh_TD, dres_TD, False, None).dy_TD.equal(dh_TD + dres_TD)


def random_norm(size: int, rounds_first: bool = True) -> RmsNorm:
    return RmsNorm(torch.randn(size), EPS, rounds_first)


def plain_norm(x_TD: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
    if norm is None:
        return x_TD
    return x_TD * torch.rsqrt(x_TD.square().mean(1, keepdim=True) + EPS) * norm.weight_D.to(x_TD.dtype)


@every_form
@every_post
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", FORWARD)
def test_add_norm_when_run_then_gives_the_sum_and_its_norm(run, size, posts, rounds_first):
    """x2 = x + y, or x + post(y), and h = norm(x2) · w, as in fp64."""
    x_TD, y_TD, norm = torch.randn(37, size), torch.randn(37, size), random_norm(size, rounds_first)
    post = random_norm(size, rounds_first) if posts else None
    x2_TD, h_TD = run(x_TD, y_TD, norm, post)
    expected_TD = x_TD.double() + plain_norm(y_TD.double(), post)
    torch.testing.assert_close(x2_TD.double(), expected_TD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h_TD.double(), plain_norm(expected_TD, norm), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("run", FORWARD)
def test_add_norm_when_nothing_is_added_then_keeps_x_itself(run):
    """Without y the sum is x, not a copy."""
    x_TD, norm = torch.randn(5, 33), random_norm(33)
    x2_TD, h_TD = run(x_TD, None, norm, None)
    assert x2_TD is x_TD
    torch.testing.assert_close(h_TD, plain_norm(x_TD, norm))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_add_norm_reference_when_run_then_has_the_bits_of_hugging_face(dtype):
    """The norm rounds where LlamaRMSNorm rounds and, its weight in another form, where Gemma3RMSNorm does."""
    x_TD, y_TD = torch.randn(64, 48).to(dtype), torch.randn(64, 48).to(dtype)
    llama, gemma = LlamaRMSNorm(48, EPS).to(dtype), Gemma3RMSNorm(48, EPS).to(dtype)
    for module in (llama, gemma):
        module.weight.data.normal_()
    assert add_norm(x_TD, None, RmsNorm(llama.weight.data, EPS))[1].equal(llama(x_TD).detach())
    norm = RmsNorm(1.0 + gemma.weight.data.float(), EPS, rounds_first=False)
    x2_TD, h_TD = add_norm(x_TD, y_TD, norm, norm)
    assert x2_TD.equal((x_TD + gemma(y_TD)).detach())
    assert h_TD.equal(gemma(x2_TD).detach())


@every_form
@every_post
def test_add_norm_kernel_when_fp16_then_rounds_as_its_reference(posts, rounds_first):
    """In half precision kernel and reference agree to the last digit or so."""
    tensors = torch.randn(37, 40).half(), torch.randn(37, 40).half()
    norm = RmsNorm(torch.randn(40).half(), EPS, rounds_first)
    norms = (norm, norm if posts else None)
    for mine, reference in zip(add_norm_kernel(*tensors, *norms), add_norm_reference(*tensors, *norms), strict=True):
        assert mine.dtype == torch.float16
        torch.testing.assert_close(mine, reference, rtol=2e-3, atol=2e-3)


@every_form
@every_post
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("more", [False, True], ids=["alone", "with residual and h"])
@pytest.mark.parametrize("run", BACKWARD)
def test_norm_grad_when_run_then_equals_autograd(run, more, size, posts, rounds_first):
    """dx is the gradient of the norm by x, plus what went around; dy that of what was added; h the norm's output."""
    x_TD, y_TD, dh_TD, dres_TD = (torch.randn(37, size) for _ in range(4))
    norm, post = (random_norm(size, rounds_first) for _ in range(2))
    added = (y_TD, post) if posts else None
    dx_TD, dy_TD, h_TD = run(x_TD, norm, dh_TD, dres_TD if more else None, more, added)
    leaf_TD = x_TD.double().requires_grad_()
    out_TD = plain_norm(leaf_TD, norm)
    (expected_TD,) = torch.autograd.grad(out_TD, leaf_TD, dh_TD.double())
    expected_TD = expected_TD + dres_TD.double() if more else expected_TD
    torch.testing.assert_close(dx_TD.double(), expected_TD, rtol=1e-5, atol=2e-5)
    assert (dy_TD is dx_TD) == (not posts)
    if posts:
        leaf_TD = y_TD.double().requires_grad_()
        (expected_TD,) = torch.autograd.grad(plain_norm(leaf_TD, post), leaf_TD, expected_TD)
        torch.testing.assert_close(dy_TD.double(), expected_TD, rtol=1e-5, atol=1e-4)
    assert (h_TD is not None) == more
    if h_TD is not None:
        torch.testing.assert_close(h_TD.double(), out_TD.detach(), rtol=1e-5, atol=1e-5)


@every_post
@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_norms_when_a_neighbour_is_nan_then_change_no_bit_of_others(run, posts):
    """NaN rows stay by themselves, even where one program holds several rows."""
    x_TD, y_TD, norm = torch.randn(40, 20), torch.randn(40, 20), random_norm(20)
    outs = []
    for poison in (False, True):
        if poison:
            x_TD[7], y_TD[7] = torch.nan, torch.nan
        if run in FORWARD:
            outs.append(torch.cat(run(x_TD, y_TD, norm, norm if posts else None), dim=1))
        else:
            outs.append(torch.cat(run(x_TD, norm, y_TD, y_TD, True, (y_TD, norm) if posts else None), dim=1))
    mine_T = torch.arange(40) != 7
    assert outs[0][mine_T].equal(outs[1][mine_T])
    assert outs[0].isfinite().all() and outs[1][7].isnan().all()
