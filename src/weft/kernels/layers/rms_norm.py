"""The residual sum and its RMS norm, and their gradient.

Forward:
    x2 = x + y                      (T, D)
    h  = x2 · rstd · w              rstd = 1 / sqrt(mean x2² + eps); x2 · rstd is rounded before w, as Hugging Face does
Backward, with dh the gradient of h:
    dx = dres + rstd · (dh w − x̂ · mean(dh w x̂))        x̂ = x · rstd; dres: the gradient that went around the norm
The weight is frozen and gets no gradient. h can be made again on the way, for the gradients of A.

fp32 inside; x2, h and dx are each rounded once. A program holds whole rows and reads everything once; a row meets only
itself: a NaN in another row changes nothing. Adding the adapters' part here too was tried: it needs tiles of 16 rows
that are read twice, and took 0.35 ms where `expand` and this take 0.15 (H200, 8192 x 4096, backward, rank 16).

Shape suffixes: T rows, D hidden size.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, next_power_of_2, runs_triton, tl


def add_norm_reference(
    x_TD: torch.Tensor, y_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain torch twin of `add_norm`."""
    x2_TD = x_TD
    if y_TD is not None:
        x2_TD = (x_TD.float() + y_TD.float()).to(x_TD.dtype)
    rstd_T1 = torch.rsqrt(x2_TD.float().square().mean(1, keepdim=True) + eps)
    h_TD = (x2_TD.float() * rstd_T1).to(x_TD.dtype).float() * weight_D.float()
    return x2_TD, h_TD.to(x_TD.dtype)


def norm_grad_reference(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    dh_TD: torch.Tensor,
    dres_TD: torch.Tensor | None,
    want_h: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The plain torch twin of `norm_grad`."""
    rstd_T1 = torch.rsqrt(x_TD.float().square().mean(1, keepdim=True) + eps)
    xhat_TD = x_TD.float() * rstd_T1
    gw_TD = dh_TD.float() * weight_D.float()
    dx_TD = rstd_T1 * (gw_TD - xhat_TD * (gw_TD * xhat_TD).mean(1, keepdim=True))
    if dres_TD is not None:
        dx_TD += dres_TD.float()
    h_TD = (xhat_TD.to(x_TD.dtype).float() * weight_D.float()).to(x_TD.dtype) if want_h else None
    return dx_TD.to(x_TD.dtype), h_TD


ROW_NUMBERS = 4_096
"""Numbers held by a program with whole rows: 16 for each of 256 threads."""


def _row_blocks(num_features: int) -> dict[str, int]:
    width = next_power_of_2(num_features)
    height = max(1, ROW_NUMBERS // width)
    return {"BM": height, "BN": width, "num_warps": min(16, max(4, width * height // 512))}


@jit
def _add_norm(  # type: ignore[no-untyped-def]
    x,
    y,
    weight,
    x2,
    h,
    stride_x,
    stride_y,
    num_rows,
    num_features,
    eps,
    HAS_Y: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = tl.arange(0, BN)
    mask = (rows < num_rows)[:, None] & (columns < num_features)[None, :]
    here = rows[:, None] * num_features + columns[None, :]
    value = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < num_features, other=0.0).to(tl.float32)
    if HAS_Y:
        value += tl.load(y + rows[:, None] * stride_y + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        value = value.to(x2.dtype.element_ty)
        tl.store(x2 + here, value, mask=mask)
        value = value.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, axis=1) / num_features + eps)
    xhat = (value * rstd[:, None]).to(h.dtype.element_ty).to(tl.float32)
    tl.store(h + here, (xhat * w[None, :]).to(h.dtype.element_ty), mask=mask)


@jit
def _norm_grad(  # type: ignore[no-untyped-def]
    x,
    weight,
    dh,
    dres,
    dx,
    h,
    stride_x,
    stride_h,
    stride_res,
    num_rows,
    num_features,
    eps,
    HAS_RES: tl.constexpr,
    WANT_H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = tl.arange(0, BN)
    mask = (rows < num_rows)[:, None] & (columns < num_features)[None, :]
    here = rows[:, None] * num_features + columns[None, :]
    value = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dh + rows[:, None] * stride_h + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < num_features, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, axis=1) / num_features + eps)
    xhat = value * rstd[:, None]
    gw = g * w[None, :]
    mean = tl.sum(gw * xhat, axis=1) / num_features
    out = rstd[:, None] * (gw - xhat * mean[:, None])
    if HAS_RES:
        out += tl.load(dres + rows[:, None] * stride_res + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + here, out.to(dx.dtype.element_ty), mask=mask)
    if WANT_H:
        xhat = xhat.to(h.dtype.element_ty).to(tl.float32)
        tl.store(h + here, (xhat * w[None, :]).to(h.dtype.element_ty), mask=mask)


def add_norm_kernel(
    x_TD: torch.Tensor, y_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_norm` by its Triton kernels."""
    num_rows, num_features = x_TD.shape
    h_TD = torch.empty((num_rows, num_features), dtype=x_TD.dtype, device=x_TD.device)
    x2_TD = x_TD if y_TD is None else torch.empty_like(h_TD)
    y = x_TD if y_TD is None else y_TD
    tensors, strides = (x_TD, y, weight_D, x2_TD, h_TD), (x_TD.stride(0), y.stride(0))
    blocks = _row_blocks(num_features)
    _add_norm[(cdiv(num_rows, blocks["BM"]),)](
        *tensors, *strides, num_rows, num_features, eps, HAS_Y=y_TD is not None, **blocks
    )
    return x2_TD, h_TD


def norm_grad_kernel(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    dh_TD: torch.Tensor,
    dres_TD: torch.Tensor | None,
    want_h: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`norm_grad` by its Triton kernels."""
    num_rows, num_features = x_TD.shape
    dx_TD = torch.empty((num_rows, num_features), dtype=x_TD.dtype, device=x_TD.device)
    h_TD = torch.empty_like(dx_TD) if want_h else None
    dres = x_TD if dres_TD is None else dres_TD
    tensors = (x_TD, weight_D, dh_TD, dres, dx_TD, dx_TD if h_TD is None else h_TD)
    strides = (x_TD.stride(0), dh_TD.stride(0), dres.stride(0))
    flags = {"HAS_RES": dres_TD is not None, "WANT_H": want_h}
    blocks = _row_blocks(num_features)
    _norm_grad[(cdiv(num_rows, blocks["BM"]),)](*tensors, *strides, num_rows, num_features, eps, **flags, **blocks)
    return dx_TD, h_TD


def add_norm(
    x_TD: torch.Tensor, y_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x2, h): the sum x + y, which is x itself without y, and its norm times the weight."""
    return (add_norm_kernel if runs_triton(x_TD) else add_norm_reference)(x_TD, y_TD, weight_D, eps)


def norm_grad(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    dh_TD: torch.Tensor,
    dres_TD: torch.Tensor | None,
    want_h: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx, h): the gradient of the norm's input x, plus `dres`; h again, where wanted."""
    run = norm_grad_kernel if runs_triton(x_TD) else norm_grad_reference
    return run(x_TD, weight_D, eps, dh_TD, dres_TD, want_h)
