"""The residual sum and its RMS norm, and their gradient.

Forward:
    x2 = x + y                      (T, D); in some families x + post(y), the norm of what a block adds
    h  = norm(x2)                   norm(x) = x · rstd · w,   rstd = 1 / sqrt(mean x² + eps); in some families h = x2
Backward, with dh the gradient of h:
    dx = dres + rstd · (dh w − x̂ · mean(dh w x̂))        x̂ = x · rstd; dres: the gradient that went around the norm
    dy = dx, or the gradient of post(y) under dx, which is the same formula without dres
The weights are frozen and get no gradient. h can be made again on the way, for the gradients of A.

fp32 inside; post(y), x2, h, dx and dy are each rounded once. A program holds whole rows and reads everything once; a
row meets only itself: a NaN in another row changes nothing. Adding the adapters' part here too was tried: it needs
tiles of 16 rows that are read twice, and took 0.35 ms where `expand` and this take 0.15 (H200, 8192 x 4096, backward,
rank 16).

Shape suffixes: T rows, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.kernels.launch import cdiv, jit, next_power_of_2, runs_triton, tl


class RmsNorm(NamedTuple):
    weight_D: torch.Tensor
    eps: float
    rounds_first: bool = True
    """True if x · rstd is rounded before the product with the weight, as Hugging Face does for most families; False for
    Gemma, whose weight here is 1 + w in fp32, and for OLMo."""


class NormGrads(NamedTuple):
    dx_TD: torch.Tensor
    dy_TD: torch.Tensor
    """Gradient of what was added to the stream: dx itself unless that was normed."""
    h_TD: torch.Tensor | None


Added = tuple[torch.Tensor, RmsNorm]
"""y_TD, what a block added to the residual stream, before its own norm; and that norm."""


def add_norm_reference(
    x_TD: torch.Tensor, y_TD: torch.Tensor | None, norm: RmsNorm | None, post: RmsNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x2_TD = x_TD
    if y_TD is not None:
        added_TD = y_TD if post is None else _normed(y_TD, post)
        x2_TD = (x_TD.float() + added_TD.float()).to(x_TD.dtype)
    return x2_TD, x2_TD if norm is None else _normed(x2_TD, norm)


def norm_grad_reference(
    x_TD: torch.Tensor,
    norm: RmsNorm | None,
    dh_TD: torch.Tensor,
    dres_TD: torch.Tensor | None,
    want_h: bool,
    added: Added | None,
) -> NormGrads:
    dx_TD = dh_TD.float() if norm is None else _normed_grad(x_TD, norm, dh_TD)
    if dres_TD is not None:
        dx_TD = dx_TD + dres_TD.float()
    dx_TD = dx_TD.to(x_TD.dtype)
    dy_TD = dx_TD if added is None else _normed_grad(*added, dx_TD).to(x_TD.dtype)
    h_TD = x_TD if norm is None else _normed(x_TD, norm)
    return NormGrads(dx_TD, dy_TD, h_TD if want_h else None)


def _normed(x_TD: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    xhat_TD = x_TD.float() * torch.rsqrt(x_TD.float().square().mean(1, keepdim=True) + norm.eps)
    if norm.rounds_first:
        xhat_TD = xhat_TD.to(x_TD.dtype).float()
    return (xhat_TD * norm.weight_D.float()).to(x_TD.dtype)


def _normed_grad(x_TD: torch.Tensor, norm: RmsNorm, dh_TD: torch.Tensor) -> torch.Tensor:
    rstd_T1 = torch.rsqrt(x_TD.float().square().mean(1, keepdim=True) + norm.eps)
    xhat_TD = x_TD.float() * rstd_T1
    gw_TD = dh_TD.float() * norm.weight_D.float()
    return rstd_T1 * (gw_TD - xhat_TD * (gw_TD * xhat_TD).mean(1, keepdim=True))


ROW_NUMBERS = 4_096
"""Numbers held by a program with whole rows: 16 for each of 256 threads."""


def _row_blocks(num_features: int) -> dict[str, int]:
    width = next_power_of_2(num_features)
    height = max(1, ROW_NUMBERS // width)
    return {"BM": height, "BN": width, "num_warps": min(16, max(4, width * height // 512))}


@jit
def _normed_rows(value, weight, num_features, eps, dtype: tl.constexpr, ROUNDS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole rows after a norm, zero past their end; rounded where Hugging Face rounds."""
    rstd = tl.rsqrt(tl.sum(value * value, axis=1) / num_features + eps)
    xhat = value * rstd[:, None]
    if ROUNDS_FIRST:
        xhat = xhat.to(dtype).to(tl.float32)
    return (xhat * weight[None, :]).to(dtype)


@jit
def _normed_rows_grad(value, grad, weight, num_features, eps):  # type: ignore[no-untyped-def]
    """The gradient of a norm's input, and x̂."""
    rstd = tl.rsqrt(tl.sum(value * value, axis=1) / num_features + eps)
    xhat = value * rstd[:, None]
    gw = grad * weight[None, :]
    mean = tl.sum(gw * xhat, axis=1) / num_features
    return rstd[:, None] * (gw - xhat * mean[:, None]), xhat


@jit
def _add_norm(  # type: ignore[no-untyped-def]
    x,
    y,
    weight,
    post_weight,
    x2,
    h,
    stride_x,
    stride_y,
    num_rows,
    num_features,
    eps,
    HAS_Y: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_POST: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    dtype = h.dtype.element_ty
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = tl.arange(0, BN)
    mask = (rows < num_rows)[:, None] & (columns < num_features)[None, :]
    here = rows[:, None] * num_features + columns[None, :]
    value = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_Y:
        added = tl.load(y + rows[:, None] * stride_y + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_POST:
            post_w = tl.load(post_weight + columns, mask=columns < num_features, other=0.0).to(tl.float32)
            added = _normed_rows(added, post_w, num_features, eps, dtype, ROUNDS_FIRST).to(tl.float32)
        value = (value + added).to(dtype)
        tl.store(x2 + here, value, mask=mask)
        value = value.to(tl.float32)
    if HAS_NORM:
        w = tl.load(weight + columns, mask=columns < num_features, other=0.0).to(tl.float32)
        tl.store(h + here, _normed_rows(value, w, num_features, eps, dtype, ROUNDS_FIRST), mask=mask)


@jit
def _norm_grad(  # type: ignore[no-untyped-def]
    x,
    weight,
    dh,
    dres,
    y,
    post_weight,
    dx,
    dy,
    h,
    stride_x,
    stride_h,
    stride_res,
    stride_y,
    num_rows,
    num_features,
    eps,
    HAS_RES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_POST: tl.constexpr,
    WANT_H: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    dtype = dx.dtype.element_ty
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = tl.arange(0, BN)
    mask = (rows < num_rows)[:, None] & (columns < num_features)[None, :]
    here = rows[:, None] * num_features + columns[None, :]
    g = tl.load(dh + rows[:, None] * stride_h + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    out = g
    if HAS_NORM:
        value = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + columns, mask=columns < num_features, other=0.0).to(tl.float32)
        out, xhat = _normed_rows_grad(value, g, w, num_features, eps)
        if WANT_H:
            kept = xhat.to(dtype).to(tl.float32) if ROUNDS_FIRST else xhat
            tl.store(h + here, (kept * w[None, :]).to(dtype), mask=mask)
    if HAS_RES:
        out += tl.load(dres + rows[:, None] * stride_res + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + here, out.to(dtype), mask=mask)
    if HAS_POST:
        added = tl.load(y + rows[:, None] * stride_y + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        post_w = tl.load(post_weight + columns, mask=columns < num_features, other=0.0).to(tl.float32)
        out, _ = _normed_rows_grad(added, out.to(dtype).to(tl.float32), post_w, num_features, eps)
        tl.store(dy + here, out.to(dtype), mask=mask)


def add_norm_kernel(
    x_TD: torch.Tensor, y_TD: torch.Tensor | None, norm: RmsNorm | None, post: RmsNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    some = norm or post
    if some is None or (norm is None and y_TD is None):
        x2_TD = x_TD if y_TD is None else x_TD + y_TD
        return x2_TD, x2_TD
    num_rows, num_features = x_TD.shape
    x2_TD = x_TD if y_TD is None else torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    h_TD = x2_TD if norm is None else torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    y = x_TD if y_TD is None else y_TD
    weights = ((norm or some).weight_D, (post or some).weight_D)
    blocks = _row_blocks(num_features)
    _add_norm[(cdiv(num_rows, blocks["BM"]),)](
        *(x_TD, y, *weights, x2_TD, h_TD, x_TD.stride(0), y.stride(0)),
        *(num_rows, num_features, some.eps),
        HAS_Y=y_TD is not None,
        HAS_NORM=norm is not None,
        HAS_POST=post is not None,
        ROUNDS_FIRST=some.rounds_first,
        **blocks,
    )
    return x2_TD, h_TD


def norm_grad_kernel(
    x_TD: torch.Tensor,
    norm: RmsNorm | None,
    dh_TD: torch.Tensor,
    dres_TD: torch.Tensor | None,
    want_h: bool,
    added: Added | None,
) -> NormGrads:
    some = norm or (None if added is None else added[1])
    if some is None:
        dx_TD = dh_TD if dres_TD is None else dh_TD + dres_TD
        return NormGrads(dx_TD, dx_TD, x_TD if want_h else None)
    num_rows, num_features = x_TD.shape
    dx_TD = torch.empty((num_rows, num_features), dtype=x_TD.dtype, device=x_TD.device)
    dy_TD = dx_TD if added is None else torch.empty_like(dx_TD)
    h_TD = torch.empty_like(dx_TD) if want_h and norm is not None else None
    dres = x_TD if dres_TD is None else dres_TD
    y_TD, post = (x_TD, some) if added is None else added
    inputs = (x_TD, some.weight_D, dh_TD, dres, y_TD, post.weight_D)
    blocks = _row_blocks(num_features)
    _norm_grad[(cdiv(num_rows, blocks["BM"]),)](
        *(*inputs, dx_TD, dy_TD, dx_TD if h_TD is None else h_TD),
        *(x_TD.stride(0), dh_TD.stride(0), dres.stride(0), y_TD.stride(0)),
        *(num_rows, num_features, some.eps),
        HAS_RES=dres_TD is not None,
        HAS_NORM=norm is not None,
        HAS_POST=added is not None,
        WANT_H=h_TD is not None,
        ROUNDS_FIRST=some.rounds_first,
        **blocks,
    )
    return NormGrads(dx_TD, dy_TD, x_TD if want_h and norm is None else h_TD)


def add_norm(
    x_TD: torch.Tensor, y_TD: torch.Tensor | None, norm: RmsNorm | None, post: RmsNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x2, h): the sum x + y, which is x itself without y, and its norm, which is the sum itself without `norm`. With
    `post` y is normed before it is added."""
    _check_alike(norm, post)
    return (add_norm_kernel if runs_triton(x_TD) else add_norm_reference)(x_TD, y_TD, norm, post)


def add(x_TD: torch.Tensor, y_TD: torch.Tensor, post: RmsNorm | None = None) -> torch.Tensor:
    """The sum that `add_norm` returns, bitwise, without its norm."""
    return add_norm(x_TD, y_TD, None, post)[0]


def norm_grad(
    x_TD: torch.Tensor,
    norm: RmsNorm | None,
    dh_TD: torch.Tensor,
    dres_TD: torch.Tensor | None,
    want_h: bool,
    added: Added | None = None,
) -> NormGrads:
    """The gradient of the norm's input x, plus `dres`; that of what was added to make x; h again, if requested."""
    _check_alike(norm, None if added is None else added[1])
    run = norm_grad_kernel if runs_triton(x_TD) else norm_grad_reference
    return run(x_TD, norm, dh_TD, dres_TD, want_h, added)


def _check_alike(norm: RmsNorm | None, post: RmsNorm | None) -> None:
    assert norm is None or post is None or post[1:] == norm[1:], "one program computes both norms in one way"
