"""Rotary positions on queries and keys, with the per-head norm of some models.

Forward, for each row t and head of q or k, with x its C numbers, of which the first 2F are rotated (v is copied, and so
are a head's numbers past 2F); n1 and n2 are the halves of the rotated numbers:
    n  = x · rstd · w                             where the model norms its heads; otherwise n = x
    o1 = n1 cos − n2 sin,  o2 = n2 cos + n1 sin   cos and sin (T, F)
Backward:
    dn1 = do1 cos + do2 sin,  dn2 = do2 cos − do1 sin
    dx  = rstd · (dn w − x̂ · mean(dn w x̂))        x̂ = x · rstd; without norm dx = dn
The norm's weights are frozen.

fp32 inside, rounded once (within a normed head also where Hugging Face rounds). The one reduction is over a head. Rows
are independent: a NaN in another row changes nothing.

Shape suffixes: T rows, E all heads' numbers side by side (q, k, v), H query heads, K key heads, C head size, F half of
the rotated numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.kernels.launch import cdiv, jit, next_power_of_2, runs_triton, tl


class HeadNorms(NamedTuple):
    wq_C: torch.Tensor
    wk_C: torch.Tensor
    eps: float
    rounds_first: bool = True
    """As in `RmsNorm`."""


@dataclass(frozen=True)
class Heads:
    """The division of qkv_TE: query heads first, then key heads, then as many value heads."""

    num_q: int
    num_kv: int
    size: int

    @property
    def num(self) -> int:
        return self.num_q + 2 * self.num_kv

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (self.num_q * self.size, self.num_kv * self.size, self.num_kv * self.size)


def rotate_reference(
    qkv_TE: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    out_TE: torch.Tensor | None,
) -> torch.Tensor:
    target_TE = _target(qkv_TE, norms, out_TE)
    parts = list(qkv_TE.float().split(heads.sizes, dim=1))
    for i in range(2):
        x_THC = parts[i].unflatten(1, (-1, heads.size))
        if norms is not None:
            x_THC = x_THC * torch.rsqrt(x_THC.square().mean(2, keepdim=True) + norms.eps)
            x_THC = x_THC.to(qkv_TE.dtype).float() if norms.rounds_first else x_THC
            x_THC = (x_THC * norms[:2][i].float()).to(qkv_TE.dtype).float()
        parts[i] = _turn(x_THC, cos_TF, sin_TF).flatten(1)
    target_TE.copy_(torch.cat(parts, dim=1))
    return target_TE


def rotate_grad_reference(
    dq_THC: torch.Tensor,
    dk_TKC: torch.Tensor,
    dv_TKC: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    qkv_TE: torch.Tensor | None,
) -> torch.Tensor:
    parts = []
    for i, d_THC in enumerate((dq_THC, dk_TKC)):
        dx_THC = _turn(d_THC.float(), cos_TF, -sin_TF)
        if norms is not None:
            assert qkv_TE is not None
            x_THC = qkv_TE.split(heads.sizes, dim=1)[i].unflatten(1, (-1, heads.size)).float()
            rstd_TH1 = torch.rsqrt(x_THC.square().mean(2, keepdim=True) + norms.eps)
            dw_THC, xhat_THC = dx_THC * norms[:2][i].float(), x_THC * rstd_TH1
            dx_THC = rstd_TH1 * (dw_THC - xhat_THC * (dw_THC * xhat_THC).mean(2, keepdim=True))
        parts.append(dx_THC.to(dq_THC.dtype).flatten(1))
    return torch.cat([*parts, dv_TKC.flatten(1)], dim=1)


def _turn(x_THC: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    turned = 2 * cos_TF.shape[1]
    x1, x2 = x_THC[..., :turned].chunk(2, dim=2)
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x_THC[..., turned:]], dim=2)


def _target(qkv_TE: torch.Tensor, norms: HeadNorms | None, out_TE: torch.Tensor | None) -> torch.Tensor:
    if out_TE is not None:
        assert norms is None or out_TE.data_ptr() != qkv_TE.data_ptr(), "backward needs qkv as it was before the norms"
        return out_TE
    return qkv_TE if norms is None else torch.empty_like(qkv_TE)


TURN_ROWS = 32
"""Rows of a program: with heads of 128 each of its 128 threads has 32 numbers of a head and 32 of cos and sin. Wider
heads have fewer rows."""
TURN_HEADS = 4
"""Heads a program takes one after another, so that cos and sin, in fp32 as large as a head, are read once for four."""


@jit
def _normed(x1, x2, w1, w2, inside, size, eps, dtype: tl.constexpr, ROUNDS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of a head after its norm, rounded where Hugging Face rounds."""
    squares = tl.sum(tl.where(inside, x1 * x1 + x2 * x2, 0.0), axis=1)
    rstd = tl.rsqrt(squares / size + eps)[:, None]
    x1, x2 = x1 * rstd, x2 * rstd
    if ROUNDS_FIRST:
        x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
    return (x1 * w1[None, :]).to(dtype).to(tl.float32), (x2 * w2[None, :]).to(dtype).to(tl.float32)


@jit
def _copy_rest(  # type: ignore[no-untyped-def]
    source, target, wide, stride_s, stride_t, rows, num_rows, FIRST: tl.constexpr, SIZE: tl.constexpr, BR: tl.constexpr
):
    """Copies the numbers of a head that are not rotated."""
    lanes = FIRST + tl.arange(0, BR)[None, :]
    mask = (rows < num_rows)[:, None] & (lanes < SIZE)
    tl.store(target + wide * stride_t + lanes, tl.load(source + wide * stride_s + lanes, mask=mask), mask=mask)


@jit
def _normed_grad(x1, x2, d1, d2, w1, w2, size, eps):  # type: ignore[no-untyped-def]
    """Gradient of a head's norm; all are zero outside the head."""
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / size + eps)[:, None]
    x1, x2 = x1 * rstd, x2 * rstd
    d1, d2 = d1 * w1[None, :], d2 * w2[None, :]
    mean = (tl.sum(d1 * x1 + d2 * x2, axis=1) / size)[:, None]
    return rstd * (d1 - x1 * mean), rstd * (d2 - x2 * mean)


@jit
def _rotate(  # type: ignore[no-untyped-def]
    qkv,
    out,
    cos,
    sin,
    weight_q,
    weight_k,
    stride_x,
    stride_o,
    stride_c,
    num_rows,
    num_q,
    num_qk,
    num_heads,
    eps,
    HAS_NORMS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    IN_PLACE: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    dtype = qkv.dtype.element_ty
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    wide = rows.to(tl.int64)[:, None]
    lanes = tl.arange(0, BN)
    mask = (rows < num_rows)[:, None] & (lanes < HALF)[None, :]
    c = tl.load(cos + wide * stride_c + lanes[None, :], mask=mask, other=0.0)
    z = tl.load(sin + wide * stride_c + lanes[None, :], mask=mask, other=0.0)
    first_head = tl.program_id(1) * HEADS
    for head in range(first_head, tl.minimum(first_head + HEADS, num_heads)):
        column = head * SIZE
        here = qkv + wide * stride_x + (column + lanes)[None, :]
        x1 = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
        if head < num_qk:
            if HAS_NORMS:
                weight = weight_q if head < num_q else weight_k
                w1 = tl.load(weight + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
                w2 = tl.load(weight + HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
                x1, x2 = _normed(x1, x2, w1, w2, mask, SIZE, eps, dtype, ROUNDS_FIRST)
            x1, x2 = x1 * c - x2 * z, x2 * c + x1 * z
        there = out + wide * stride_o + (column + lanes)[None, :]
        tl.store(there, x1.to(dtype), mask=mask)
        tl.store(there + HALF, x2.to(dtype), mask=mask)
        if 2 * HALF < SIZE and not IN_PLACE:
            _copy_rest(qkv + column, out + column, wide, stride_x, stride_o, rows, num_rows, 2 * HALF, SIZE, BR)


@jit
def _rotate_grad(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    qkv,
    out,
    cos,
    sin,
    weight_q,
    weight_k,
    stride_tq,
    stride_hq,
    stride_tk,
    stride_hk,
    stride_tv,
    stride_hv,
    stride_x,
    stride_o,
    stride_c,
    num_rows,
    num_q,
    num_qk,
    num_heads,
    eps,
    HAS_NORMS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    dtype = out.dtype.element_ty
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    wide = rows.to(tl.int64)[:, None]
    lanes = tl.arange(0, BN)
    mask = (rows < num_rows)[:, None] & (lanes < HALF)[None, :]
    c = tl.load(cos + wide * stride_c + lanes[None, :], mask=mask, other=0.0)
    z = tl.load(sin + wide * stride_c + lanes[None, :], mask=mask, other=0.0)
    first_head = tl.program_id(1) * HEADS
    for head in range(first_head, tl.minimum(first_head + HEADS, num_heads)):
        if head < num_q:
            source = dq + head * stride_hq + wide * stride_tq
        elif head < num_qk:
            source = dk + (head - num_q) * stride_hk + wide * stride_tk
        else:
            source = dv + (head - num_qk) * stride_hv + wide * stride_tv
        d1 = tl.load(source + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
        d2 = tl.load(source + HALF + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
        column = head * SIZE
        if head < num_qk:
            d1, d2 = d1 * c + d2 * z, d2 * c - d1 * z
            if HAS_NORMS:
                here = qkv + wide * stride_x + (column + lanes)[None, :]
                x1 = tl.load(here, mask=mask, other=0.0).to(tl.float32)
                x2 = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
                weight = weight_q if head < num_q else weight_k
                w1 = tl.load(weight + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
                w2 = tl.load(weight + HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
                d1, d2 = _normed_grad(x1, x2, d1, d2, w1, w2, SIZE, eps)
        there = out + wide * stride_o + (column + lanes)[None, :]
        tl.store(there, d1.to(dtype), mask=mask)
        tl.store(there + HALF, d2.to(dtype), mask=mask)
        if 2 * HALF < SIZE:
            _copy_rest(source, out + column, wide, 0, stride_o, rows, num_rows, 2 * HALF, SIZE, BR)


def _blocks(heads: Heads, half: int) -> dict[str, int]:
    width, rest = (max(16, next_power_of_2(number)) for number in (half, heads.size - 2 * half))
    rows = TURN_ROWS // max(1, width // 64)
    return {"SIZE": heads.size, "HALF": half, "HEADS": TURN_HEADS, "BM": rows, "BN": width, "BR": rest, "num_warps": 4}


def rotate_kernel(
    qkv_TE: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    out_TE: torch.Tensor | None,
) -> torch.Tensor:
    num_rows = qkv_TE.shape[0]
    target_TE = _target(qkv_TE, norms, out_TE)
    wq_C, wk_C, eps, rounds_first = norms or HeadNorms(cos_TF, cos_TF, 0.0)
    # In place there is nothing to do to v.
    num_heads = heads.num - (heads.num_kv if target_TE is qkv_TE else 0)
    blocks = _blocks(heads, cos_TF.shape[1])
    _rotate[(cdiv(num_rows, blocks["BM"]), cdiv(num_heads, TURN_HEADS))](
        qkv_TE,
        target_TE,
        cos_TF,
        sin_TF,
        wq_C,
        wk_C,
        qkv_TE.stride(0),
        target_TE.stride(0),
        cos_TF.stride(0),
        num_rows,
        heads.num_q,
        heads.num_q + heads.num_kv,
        num_heads,
        eps,
        HAS_NORMS=norms is not None,
        ROUNDS_FIRST=rounds_first,
        IN_PLACE=target_TE is qkv_TE,
        **blocks,
    )
    return target_TE


def rotate_grad_kernel(
    dq_THC: torch.Tensor,
    dk_TKC: torch.Tensor,
    dv_TKC: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    qkv_TE: torch.Tensor | None,
) -> torch.Tensor:
    num_rows = dq_THC.shape[0]
    assert all(d.stride(2) == 1 for d in (dq_THC, dk_TKC, dv_TKC)) and (norms is None or qkv_TE is not None)
    out_TE = torch.empty((num_rows, sum(heads.sizes)), dtype=dq_THC.dtype, device=dq_THC.device)
    wq_C, wk_C, eps, _ = norms or HeadNorms(cos_TF, cos_TF, 0.0)
    raw_TE = out_TE if qkv_TE is None else qkv_TE
    strides = [d.stride(i) for d in (dq_THC, dk_TKC, dv_TKC) for i in (0, 1)]
    blocks = _blocks(heads, cos_TF.shape[1])
    _rotate_grad[(cdiv(num_rows, blocks["BM"]), cdiv(heads.num, TURN_HEADS))](
        dq_THC,
        dk_TKC,
        dv_TKC,
        raw_TE,
        out_TE,
        cos_TF,
        sin_TF,
        wq_C,
        wk_C,
        *strides,
        raw_TE.stride(0),
        out_TE.stride(0),
        cos_TF.stride(0),
        num_rows,
        heads.num_q,
        heads.num_q + heads.num_kv,
        heads.num,
        eps,
        HAS_NORMS=norms is not None,
        **blocks,
    )
    return out_TE


def rotate(
    qkv_TE: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    out_TE: torch.Tensor | None = None,
) -> torch.Tensor:
    """q, k and v, with q and k normed and rotated by their positions.

    In place, unless `out_TE` is given or heads are normed: then the result is another tensor, and qkv_TE stays as it is
    for the norms' backward. `cos_TF` and `sin_TF`: fp32, for the first half of the rotated numbers of a head; normed
    heads are rotated whole.
    """
    turned = 2 * cos_TF.shape[1]
    assert cos_TF.shape == sin_TF.shape and len(cos_TF) == len(qkv_TE)
    assert turned == heads.size or (turned < heads.size and norms is None)
    run = rotate_kernel if runs_triton(qkv_TE) else rotate_reference
    return run(qkv_TE, cos_TF, sin_TF, heads, norms, out_TE)


def rotate_grad(
    dq_THC: torch.Tensor,
    dk_TKC: torch.Tensor,
    dv_TKC: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    qkv_TE: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of q, k and v side by side before `rotate`; normed heads need the `qkv_TE` it left."""
    run = rotate_grad_kernel if runs_triton(dq_THC) else rotate_grad_reference
    return run(dq_THC, dk_TKC, dv_TKC, cos_TF, sin_TF, heads, norms, qkv_TE)
