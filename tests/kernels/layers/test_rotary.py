"""Rotary positions and head norms of q, k and v."""

from __future__ import annotations

import pytest
import torch
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from weft.kernels.layers.rotary import (
    HeadNorms,
    Heads,
    Turns,
    rotate_grad_kernel,
    rotate_grad_reference,
    rotate_kernel,
    rotate_reference,
)

FORWARD = [rotate_reference, rotate_kernel]
BACKWARD = [rotate_grad_reference, rotate_grad_kernel]
HEADS = Heads(num_q=4, num_kv=2, size=24)
"""More heads than a program takes at once, of a size that is no power of two."""
EPS = 1e-6


FORMS = ["plain", "partly", "stretched", "normed", "normed, one plus", "normed at once", "normed at once, stretched"]
"""Whole heads are turned, or three quarters of them, or stretched as well; normed ones are rounded before the weight,
or after it, and each by itself or all at once."""


def angles(num_rows: int, form: str = "plain") -> Turns:
    angles_TF = torch.rand(num_rows, HEADS.size * (3 if form == "partly" else 4) // 8) * 6
    stretch_T = 0.5 + torch.rand(num_rows) if form.endswith("stretched") else None
    return Turns(angles_TF.cos(), angles_TF.sin(), stretch_T)


def head_norms(form: str) -> HeadNorms | None:
    if not form.startswith("normed"):
        return None
    is_wide = "at once" in form
    weights = (torch.randn(HEADS.size * (num if is_wide else 1)) for num in (HEADS.num_q, HEADS.num_kv))
    return HeadNorms(*weights, EPS, form == "normed", is_wide)


def plain(x_TE: torch.Tensor, turns: Turns, norms: HeadNorms | None) -> torch.Tensor:
    """q, k and v after norms and positions, by Hugging Face's rotation of Phi, in fp64."""
    q, k, v = (part.unflatten(1, (-1, HEADS.size)) for part in x_TE.split(HEADS.sizes, dim=1))
    if norms is not None:
        over = (1, 2) if norms.is_wide else 2
        wq, wk = (weight.double().view(-1, HEADS.size) for weight in norms[:2])
        q = q * torch.rsqrt(q.square().mean(over, keepdim=True) + EPS) * wq
        k = k * torch.rsqrt(k.square().mean(over, keepdim=True) + EPS) * wk
    cos, sin = (torch.cat([half, half], dim=1).double() for half in turns[:2])
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    if turns.stretch_T is not None:
        q = q * turns.stretch_T.double()[:, None, None]
    return torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", FORWARD)
def test_rotate_when_run_then_equals_hugging_face(run, form):
    """q and k are turned, v is not; where heads are normed qkv keeps every bit."""
    qkv_TE, norms, turns = torch.randn(37, sum(HEADS.sizes)), head_norms(form), angles(37, form)
    before_TE = qkv_TE.clone()
    out_TE = run(qkv_TE, turns, HEADS, norms)
    torch.testing.assert_close(out_TE.double(), plain(before_TE.double(), turns, norms), rtol=1e-5, atol=1e-5)
    assert (out_TE is qkv_TE) == (norms is None)
    assert qkv_TE.equal(before_TE) == (norms is not None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", BACKWARD)
def test_rotate_grad_when_run_then_equals_autograd(run, form):
    """The gradients of q, k and v come back side by side, through positions and norms; strides are free."""
    norms, turns = head_norms(form), angles(37, form)
    qkv_TE = torch.randn(37, sum(HEADS.sizes))
    dq_THC = torch.randn(HEADS.num_q, 37, HEADS.size).transpose(0, 1)
    dk_TKC, dv_TKC = (torch.randn(37, HEADS.num_kv, HEADS.size) for _ in range(2))
    out_TE = run(dq_THC, dk_TKC, dv_TKC, turns, HEADS, norms, qkv_TE if norms else None)
    leaf_TE = qkv_TE.double().requires_grad_()
    grad_TE = torch.cat([d.flatten(1) for d in (dq_THC, dk_TKC, dv_TKC)], dim=1).double()
    (expected_TE,) = torch.autograd.grad(plain(leaf_TE, turns, norms), leaf_TE, grad_TE)
    torch.testing.assert_close(out_TE.double(), expected_TE, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_rotate_kernels_when_fp16_then_round_as_their_references(form):
    """In half precision kernel and reference agree to the last digit or so, forward and backward."""
    norms, turns = head_norms(form), angles(37, form)
    qkv_TE = torch.randn(37, sum(HEADS.sizes)).half()
    outs = [run(qkv_TE.clone(), turns, HEADS, norms) for run in FORWARD]
    torch.testing.assert_close(outs[1], outs[0], rtol=3e-3, atol=3e-3)
    parts = [part.unflatten(1, (-1, HEADS.size)) for part in outs[0].split(HEADS.sizes, dim=1)]
    grads = [run(*parts, turns, HEADS, norms, qkv_TE) for run in BACKWARD]
    torch.testing.assert_close(grads[1], grads[0], rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("form", ["normed", "normed at once, stretched"])
@pytest.mark.parametrize("run", FORWARD)
def test_rotate_when_a_neighbour_is_nan_then_changes_no_bit_of_others(run, form):
    """NaN rows stay by themselves."""
    qkv_TE, norms, turns = torch.randn(37, sum(HEADS.sizes)), head_norms(form), angles(37, form)
    clean_TE = run(qkv_TE, turns, HEADS, norms)
    qkv_TE[5] = torch.nan
    out_TE = run(qkv_TE, turns, HEADS, norms)
    mine_T = torch.arange(37) != 5
    assert clean_TE[mine_T].equal(out_TE[mine_T])
    assert clean_TE.isfinite().all() and out_TE[5].isnan().all()
