"""Rotary positions on queries and keys, with the per-head norm of some models.

Forward, for each row t and head of q or k, with x its C numbers, of which the first 2F are rotated (v is copied, and so
are a head's numbers past 2F); n1 and n2 are the halves of the rotated numbers:
    n  = x · rstd · w                             where the model norms its heads; otherwise n = x
    o1 = n1 cos − n2 sin,  o2 = n2 cos + n1 sin   cos and sin (T, F)
    o  = o · f                                    for q only, in families that stretch q by its position; f (T)
rstd is of one head, or of all heads of q (of k) at once.
Backward, with do · f in place of do for q:
    dn1 = do1 cos + do2 sin,  dn2 = do2 cos − do1 sin
    dx  = rstd · (dn w − x̂ · mean(dn w x̂))        x̂ = x · rstd; without norm dx = dn
The norm's weights are frozen.

fp32 inside, rounded once (within a normed head, and before f, also where Hugging Face rounds). The one reduction is
over a head or, head after head, over all heads of q or k. Rows are independent: a NaN in another row changes nothing.

Shape suffixes: T rows, E all heads' numbers side by side (q, k, v), H query heads, K key heads, C head size, F half of
the rotated numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.kernels.launch import cdiv, jit, next_power_of_2, on_device, runs_triton, tl


class HeadNorms(NamedTuple):
    wq_C: torch.Tensor
    wk_C: torch.Tensor
    eps: float
    rounds_first: bool = True
    """As in `RmsNorm`."""
    is_wide: bool = False
    """True if all heads of q, and all of k, are normed at once; the weights then have the numbers of all heads."""


class Turns(NamedTuple):
    """The angles of the rows, fp32."""

    cos_TF: torch.Tensor
    sin_TF: torch.Tensor
    stretch_T: torch.Tensor | None = None
    """Factors of the rotated queries, in families that have them."""


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


def rotate_reference(qkv_TE: torch.Tensor, turns: Turns, heads: Heads, norms: HeadNorms | None) -> torch.Tensor:
    target_TE = _target(qkv_TE, norms)
    parts = list(qkv_TE.float().split(heads.sizes, dim=1))
    for i in range(2):
        x_THC = parts[i].unflatten(1, (-1, heads.size))
        if norms is not None:
            x_THC = x_THC * torch.rsqrt(_means(x_THC.square(), norms) + norms.eps)
            x_THC = x_THC.to(qkv_TE.dtype).float() if norms.rounds_first else x_THC
            x_THC = (x_THC * norms[:2][i].float().view(-1, heads.size)).to(qkv_TE.dtype).float()
        parts[i] = _turn(x_THC, turns.cos_TF, turns.sin_TF).flatten(1)
        if i == 0 and turns.stretch_T is not None:
            parts[i] = parts[i].to(qkv_TE.dtype).float() * turns.stretch_T[:, None]
    target_TE.copy_(torch.cat(parts, dim=1))
    return target_TE


def rotate_grad_reference(
    dq_THC: torch.Tensor,
    dk_TKC: torch.Tensor,
    dv_TKC: torch.Tensor,
    turns: Turns,
    heads: Heads,
    norms: HeadNorms | None,
    qkv_TE: torch.Tensor | None,
) -> torch.Tensor:
    parts = []
    for i, d_THC in enumerate((dq_THC, dk_TKC)):
        stretch_T = turns.stretch_T if i == 0 else None
        do_THC = d_THC.float() if stretch_T is None else d_THC.float() * stretch_T[:, None, None]
        dx_THC = _turn(do_THC, turns.cos_TF, -turns.sin_TF)
        if norms is not None:
            assert qkv_TE is not None
            x_THC = qkv_TE.split(heads.sizes, dim=1)[i].unflatten(1, (-1, heads.size)).float()
            rstd_TH1 = torch.rsqrt(_means(x_THC.square(), norms) + norms.eps)
            dw_THC, xhat_THC = dx_THC * norms[:2][i].float().view(-1, heads.size), x_THC * rstd_TH1
            dx_THC = rstd_TH1 * (dw_THC - xhat_THC * _means(dw_THC * xhat_THC, norms))
        parts.append(dx_THC.to(dq_THC.dtype).flatten(1))
    return torch.cat([*parts, dv_TKC.flatten(1)], dim=1)


def _means(x_THC: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
    return x_THC.mean((1, 2) if norms.is_wide else 2, keepdim=True)


def _turn(x_THC: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    turned = 2 * cos_TF.shape[1]
    x1, x2 = x_THC[..., :turned].chunk(2, dim=2)
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x_THC[..., turned:]], dim=2)


def _target(qkv_TE: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
    return qkv_TE if norms is None else torch.empty_like(qkv_TE)


TURN_ROWS = 32
"""Rows of a program: with heads of 128 each of its 128 threads has 32 numbers of a head and 32 of cos and sin. Wider
heads have fewer rows."""
TURN_HEADS = 4
"""Heads a program takes one after another, so that cos and sin, in fp32 as large as a head, are read once for four."""


@jit
def _normed(x1, x2, w1, w2, squares, size, eps, dtype: tl.constexpr, ROUNDS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of a head after its norm, rounded where Hugging Face rounds."""
    rstd = tl.rsqrt(squares / size + eps)[:, None]
    x1, x2 = x1 * rstd, x2 * rstd
    if ROUNDS_FIRST:
        x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
    return (x1 * w1[None, :]).to(dtype).to(tl.float32), (x2 * w2[None, :]).to(dtype).to(tl.float32)


@jit
def _normed_grad(x1, x2, d1, d2, w1, w2, squares, products, size, eps, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of a head's norm; all are zero outside the head. `squares` and `products`: sums of x² and of x · d · w,
    over all heads where these are normed at once."""
    rstd = tl.rsqrt(squares / size + eps)[:, None]
    x1, x2 = x1 * rstd, x2 * rstd
    d1, d2 = d1 * w1[None, :], d2 * w2[None, :]
    mean = products[:, None] * rstd / size if IS_WIDE else (tl.sum(d1 * x1 + d2 * x2, axis=1) / size)[:, None]
    return rstd * (d1 - x1 * mean), rstd * (d2 - x2 * mean)


@jit
def _own_heads(first, num_q, num_qk, num_heads, HEADS: tl.constexpr, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The heads of a program; where all of q are normed at once, all of q, of k, or of v."""
    if IS_WIDE:
        begin = tl.where(first == 0, 0, tl.where(first == 1, num_q, num_qk))
        end = tl.where(first == 0, num_q, tl.where(first == 1, num_qk, num_heads))
    else:
        begin = first * HEADS
        end = tl.minimum(begin + HEADS, num_heads)
    return begin, end


@jit
def _rotate(  # type: ignore[no-untyped-def]
    qkv,
    out,
    cos,
    sin,
    stretch,
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
    IS_WIDE: tl.constexpr,
    STRETCHES: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    dtype = qkv.dtype.element_ty
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    wide = rows.to(tl.int64)[:, None]
    lanes = tl.arange(0, BN)
    mask = (rows < num_rows)[:, None] & (lanes < HALF)[None, :]
    c = tl.load(cos + wide * stride_c + lanes[None, :], mask=mask, other=0.0)
    z = tl.load(sin + wide * stride_c + lanes[None, :], mask=mask, other=0.0)
    if STRETCHES:
        factor = tl.load(stretch + rows, mask=rows < num_rows, other=0.0)[:, None]
    first_head, end_head = _own_heads(tl.program_id(1), num_q, num_qk, num_heads, HEADS, IS_WIDE)
    squares, size = tl.zeros((BM,), tl.float32), SIZE
    if IS_WIDE:
        size = (end_head - first_head) * SIZE
        for head in range(first_head, tl.minimum(end_head, num_qk)):
            here = qkv + wide * stride_x + (head * SIZE + lanes)[None, :]
            x1 = tl.load(here, mask=mask, other=0.0).to(tl.float32)
            x2 = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
            squares += tl.sum(x1 * x1 + x2 * x2, axis=1)
    for head in range(first_head, end_head):
        column = head * SIZE
        here = qkv + wide * stride_x + (column + lanes)[None, :]
        x1 = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
        if head < num_qk:
            if HAS_NORMS:
                weight = weight_q if head < num_q else weight_k
                if IS_WIDE:
                    weight += (head - first_head) * SIZE
                else:
                    squares = tl.sum(tl.where(mask, x1 * x1 + x2 * x2, 0.0), axis=1)
                w1 = tl.load(weight + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
                w2 = tl.load(weight + HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
                x1, x2 = _normed(x1, x2, w1, w2, squares, size, eps, dtype, ROUNDS_FIRST)
            x1, x2 = x1 * c - x2 * z, x2 * c + x1 * z
            if STRETCHES:
                own = tl.where(head < num_q, factor, 1.0)
                x1, x2 = x1.to(dtype).to(tl.float32) * own, x2.to(dtype).to(tl.float32) * own
        there = out + wide * stride_o + (column + lanes)[None, :]
        tl.store(there, x1.to(dtype), mask=mask)
        tl.store(there + HALF, x2.to(dtype), mask=mask)


@jit
def _rotate_grad(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    qkv,
    out,
    cos,
    sin,
    stretch,
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
    IS_WIDE: tl.constexpr,
    STRETCHES: tl.constexpr,
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
    if STRETCHES:
        factor = tl.load(stretch + rows, mask=rows < num_rows, other=0.0)[:, None]
    first_head, end_head = _own_heads(tl.program_id(1), num_q, num_qk, num_heads, HEADS, IS_WIDE)
    squares, products, size = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32), SIZE
    if IS_WIDE:
        size = (end_head - first_head) * SIZE
        for head in range(first_head, tl.minimum(end_head, num_qk)):
            if head < num_q:
                source = dq + head * stride_hq + wide * stride_tq
            else:
                source = dk + (head - num_q) * stride_hk + wide * stride_tk
            d1 = tl.load(source + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
            d2 = tl.load(source + HALF + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
            if STRETCHES:
                own = tl.where(head < num_q, factor, 1.0)
                d1, d2 = d1 * own, d2 * own
            d1, d2 = d1 * c + d2 * z, d2 * c - d1 * z
            here = qkv + wide * stride_x + (head * SIZE + lanes)[None, :]
            x1 = tl.load(here, mask=mask, other=0.0).to(tl.float32)
            x2 = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
            weight = (weight_q if head < num_q else weight_k) + (head - first_head) * SIZE
            w1 = tl.load(weight + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
            w2 = tl.load(weight + HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
            squares += tl.sum(x1 * x1 + x2 * x2, axis=1)
            products += tl.sum(d1 * w1[None, :] * x1 + d2 * w2[None, :] * x2, axis=1)
    for head in range(first_head, end_head):
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
            if STRETCHES:
                own = tl.where(head < num_q, factor, 1.0)
                d1, d2 = d1 * own, d2 * own
            d1, d2 = d1 * c + d2 * z, d2 * c - d1 * z
            if HAS_NORMS:
                here = qkv + wide * stride_x + (column + lanes)[None, :]
                x1 = tl.load(here, mask=mask, other=0.0).to(tl.float32)
                x2 = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
                weight = weight_q if head < num_q else weight_k
                if IS_WIDE:
                    weight += (head - first_head) * SIZE
                else:
                    squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
                w1 = tl.load(weight + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
                w2 = tl.load(weight + HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)
                d1, d2 = _normed_grad(x1, x2, d1, d2, w1, w2, squares, products, size, eps, IS_WIDE)
        there = out + wide * stride_o + (column + lanes)[None, :]
        tl.store(there, d1.to(dtype), mask=mask)
        tl.store(there + HALF, d2.to(dtype), mask=mask)
        if 2 * HALF < SIZE:
            rest = 2 * HALF + tl.arange(0, BR)[None, :]
            mine = (rows < num_rows)[:, None] & (rest < SIZE)
            tl.store(out + column + wide * stride_o + rest, tl.load(source + rest, mask=mine), mask=mine)


def _blocks(heads: Heads, half: int) -> dict[str, int]:
    width = max(16, next_power_of_2(half))
    rows = TURN_ROWS // max(1, width // 64)
    return {"SIZE": heads.size, "HALF": half, "HEADS": TURN_HEADS, "BM": rows, "BN": width, "num_warps": 4}


def _num_programs(num_rows: int, num_heads: int, norms: HeadNorms, rows: int) -> tuple[int, int]:
    return cdiv(num_rows, rows), 3 if norms.is_wide else cdiv(num_heads, TURN_HEADS)


def rotate_kernel(qkv_TE: torch.Tensor, turns: Turns, heads: Heads, norms: HeadNorms | None) -> torch.Tensor:
    num_rows = qkv_TE.shape[0]
    target_TE = _target(qkv_TE, norms)
    cos_TF, sin_TF, stretch_T = turns
    used = norms or HeadNorms(cos_TF, cos_TF, 0.0)
    # In place there is nothing to do to v.
    num_heads = heads.num - (heads.num_kv if target_TE is qkv_TE else 0)
    blocks = _blocks(heads, cos_TF.shape[1])
    _rotate[_num_programs(num_rows, num_heads, used, blocks["BM"])](
        qkv_TE,
        target_TE,
        cos_TF,
        sin_TF,
        cos_TF if stretch_T is None else stretch_T,
        used.wq_C,
        used.wk_C,
        qkv_TE.stride(0),
        target_TE.stride(0),
        cos_TF.stride(0),
        num_rows,
        heads.num_q,
        heads.num_q + heads.num_kv,
        num_heads,
        used.eps,
        HAS_NORMS=norms is not None,
        IS_WIDE=used.is_wide,
        STRETCHES=stretch_T is not None,
        ROUNDS_FIRST=used.rounds_first,
        **blocks,
    )
    return target_TE


def rotate_grad_kernel(
    dq_THC: torch.Tensor,
    dk_TKC: torch.Tensor,
    dv_TKC: torch.Tensor,
    turns: Turns,
    heads: Heads,
    norms: HeadNorms | None,
    qkv_TE: torch.Tensor | None,
) -> torch.Tensor:
    num_rows = dq_THC.shape[0]
    assert all(d.stride(2) == 1 for d in (dq_THC, dk_TKC, dv_TKC)) and (norms is None or qkv_TE is not None)
    out_TE = torch.empty((num_rows, sum(heads.sizes)), dtype=dq_THC.dtype, device=dq_THC.device)
    cos_TF, sin_TF, stretch_T = turns
    used = norms or HeadNorms(cos_TF, cos_TF, 0.0)
    raw_TE = out_TE if qkv_TE is None else qkv_TE
    strides = [d.stride(i) for d in (dq_THC, dk_TKC, dv_TKC) for i in (0, 1)]
    blocks = _blocks(heads, cos_TF.shape[1])
    _rotate_grad[_num_programs(num_rows, heads.num, used, blocks["BM"])](
        dq_THC,
        dk_TKC,
        dv_TKC,
        raw_TE,
        out_TE,
        cos_TF,
        sin_TF,
        cos_TF if stretch_T is None else stretch_T,
        used.wq_C,
        used.wk_C,
        *strides,
        raw_TE.stride(0),
        out_TE.stride(0),
        cos_TF.stride(0),
        num_rows,
        heads.num_q,
        heads.num_q + heads.num_kv,
        heads.num,
        used.eps,
        HAS_NORMS=norms is not None,
        IS_WIDE=used.is_wide,
        STRETCHES=stretch_T is not None,
        BR=max(16, next_power_of_2(heads.size - 2 * blocks["HALF"])),
        **blocks,
    )
    return out_TE


def rotate(qkv_TE: torch.Tensor, turns: Turns, heads: Heads, norms: HeadNorms | None) -> torch.Tensor:
    """q, k and v, with q and k normed and rotated by their positions. In place, unless heads are normed: then the
    result is another tensor, and qkv_TE stays as it is for the norms' backward. `turns`: for the first half of the
    rotated numbers of a head; normed heads are rotated whole."""
    turned = 2 * turns.cos_TF.shape[1]
    assert turns.cos_TF.shape == turns.sin_TF.shape and len(turns.cos_TF) == len(qkv_TE)
    assert turned == heads.size or (turned < heads.size and norms is None)
    run = rotate_kernel if runs_triton(qkv_TE) else rotate_reference
    return run(qkv_TE, turns, heads, norms)


rotate_grad = on_device(rotate_grad_kernel, rotate_grad_reference)
"""The gradient of q, k and v side by side before `rotate`; normed heads need the `qkv_TE` it left."""
