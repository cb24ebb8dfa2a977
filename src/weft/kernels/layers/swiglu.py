"""The gated activation of a feed-forward layer, and its gradient.

Forward, with g and u the halves of gu, which has the adapters' part in it:
    act = silu(g) · u                          silu(g) = g σ(g)
Backward, from dact:
    dg = dact · u · σ(g) · (1 + g (1 − σ(g))),    du = dact · silu(g)
The backward can make act again on the way, with the bits of the forward, for the gradients of A of the product that
reads it. Its result takes gu's place in memory.

fp32 inside, every result rounded once; nothing is summed. A NaN in another row changes nothing.

Shape suffixes: T rows, I inner size, J = 2 I.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, runs_triton, tl


def swiglu_reference(gu_TJ: torch.Tensor) -> torch.Tensor:
    """The plain torch twin of `swiglu`."""
    g_TI, u_TI = gu_TJ.float().chunk(2, dim=1)
    return (g_TI * torch.sigmoid(g_TI) * u_TI).to(gu_TJ.dtype)


def swiglu_grad_reference(
    gu_TJ: torch.Tensor, dact_TI: torch.Tensor, want_act: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The plain torch twin of `swiglu_grad`."""
    act_TI = swiglu_reference(gu_TJ) if want_act else None
    g_TI, u_TI = gu_TJ.float().chunk(2, dim=1)
    d_TI, gate_TI = dact_TI.float(), torch.sigmoid(g_TI)
    dg_TI = d_TI * u_TI * gate_TI * (1 + g_TI * (1 - gate_TI))
    gu_TJ.copy_(torch.cat([dg_TI, d_TI * g_TI * gate_TI], dim=1))
    return gu_TJ, act_TI


BLOCK = {"BM": 64, "BN": 64, "SPAN": 512}
"""Rows and columns of a block, and columns of one program, which takes block after block: so it can ask for the next
one while it works."""
FORWARD_LAUNCH = {**BLOCK, "num_warps": 8, "num_stages": 3, "maxnreg": 80}
"""Registers decide how many programs run side by side."""
BACKWARD_LAUNCH = {**BLOCK, "num_warps": 4, "num_stages": 3}


@jit
def _block(x, wide, stride, offset, row_mask, first, edge, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of columns as it is stored. Asked for one round before it is used: Triton loads ahead by itself only what
    goes into a product."""
    columns = first + tl.arange(0, BN)
    mask = row_mask[:, None] & (columns < edge)[None, :]
    return tl.load(x + wide * stride + (offset + columns)[None, :], mask=mask, other=0.0)


@jit
def _swiglu(  # type: ignore[no-untyped-def]
    gu,
    act,
    stride_x,
    num_rows,
    num_inner,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    row_mask = rows < num_rows
    wide = rows.to(tl.int64)[:, None]
    begin = tl.program_id(0) * SPAN
    edge = tl.minimum(begin + SPAN, num_inner)
    next_g = _block(gu, wide, stride_x, 0, row_mask, begin, edge, BN)
    next_u = _block(gu, wide, stride_x, num_inner, row_mask, begin, edge, BN)
    for c in range(begin, begin + SPAN, BN):
        columns = c + tl.arange(0, BN)
        mask = row_mask[:, None] & (columns < num_inner)[None, :]
        g, u = next_g.to(tl.float32), next_u.to(tl.float32)
        next_g = _block(gu, wide, stride_x, 0, row_mask, c + BN, edge, BN)
        next_u = _block(gu, wide, stride_x, num_inner, row_mask, c + BN, edge, BN)
        value = g * tl.sigmoid(g) * u
        tl.store(act + wide * num_inner + columns[None, :], value.to(act.dtype.element_ty), mask=mask)


@jit
def _swiglu_grad(  # type: ignore[no-untyped-def]
    gu,
    dact,
    act,
    stride_x,
    stride_d,
    num_rows,
    num_inner,
    WANT_ACT: tl.constexpr,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    row_mask = rows < num_rows
    wide = rows.to(tl.int64)[:, None]
    begin = tl.program_id(0) * SPAN
    edge = tl.minimum(begin + SPAN, num_inner)
    next_g = _block(gu, wide, stride_x, 0, row_mask, begin, edge, BN)
    next_u = _block(gu, wide, stride_x, num_inner, row_mask, begin, edge, BN)
    next_d = _block(dact, wide, stride_d, 0, row_mask, begin, edge, BN)
    for c in range(begin, begin + SPAN, BN):
        columns = c + tl.arange(0, BN)
        mask = row_mask[:, None] & (columns < num_inner)[None, :]
        g, u, d = next_g.to(tl.float32), next_u.to(tl.float32), next_d.to(tl.float32)
        next_g = _block(gu, wide, stride_x, 0, row_mask, c + BN, edge, BN)
        next_u = _block(gu, wide, stride_x, num_inner, row_mask, c + BN, edge, BN)
        next_d = _block(dact, wide, stride_d, 0, row_mask, c + BN, edge, BN)
        gate = tl.sigmoid(g)
        silu = g * gate
        out = gu + wide * stride_x + columns[None, :]
        tl.store(out, (d * u * gate * (1.0 + g * (1.0 - gate))).to(gu.dtype.element_ty), mask=mask)
        tl.store(out + num_inner, (d * silu).to(gu.dtype.element_ty), mask=mask)
        if WANT_ACT:
            value = (silu * u).to(act.dtype.element_ty)
            tl.store(act + wide * num_inner + columns[None, :], value, mask=mask)


def _grid(num_rows: int, num_inner: int) -> tuple[int, int]:
    return cdiv(num_inner, BLOCK["SPAN"]), cdiv(num_rows, BLOCK["BM"])


def swiglu_kernel(gu_TJ: torch.Tensor) -> torch.Tensor:
    """`swiglu` by its Triton kernel."""
    num_rows, num_inner = gu_TJ.shape[0], gu_TJ.shape[1] // 2
    act_TI = torch.empty((num_rows, num_inner), dtype=gu_TJ.dtype, device=gu_TJ.device)
    _swiglu[_grid(num_rows, num_inner)](gu_TJ, act_TI, gu_TJ.stride(0), num_rows, num_inner, **FORWARD_LAUNCH)
    return act_TI


def swiglu_grad_kernel(
    gu_TJ: torch.Tensor, dact_TI: torch.Tensor, want_act: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`swiglu_grad` by its Triton kernel."""
    num_rows, num_inner = dact_TI.shape
    act_TI = torch.empty_like(dact_TI, memory_format=torch.contiguous_format) if want_act else None
    _swiglu_grad[_grid(num_rows, num_inner)](
        gu_TJ,
        dact_TI,
        gu_TJ if act_TI is None else act_TI,
        gu_TJ.stride(0),
        dact_TI.stride(0),
        num_rows,
        num_inner,
        WANT_ACT=want_act,
        **BACKWARD_LAUNCH,
    )
    return gu_TJ, act_TI


def swiglu(gu_TJ: torch.Tensor) -> torch.Tensor:
    """silu(g) · u of both halves."""
    return (swiglu_kernel if runs_triton(gu_TJ) else swiglu_reference)(gu_TJ)


def swiglu_grad(gu_TJ: torch.Tensor, dact_TI: torch.Tensor, want_act: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dgu, act): the gradient of gu, written over gu; act again, where wanted."""
    return (swiglu_grad_kernel if runs_triton(gu_TJ) else swiglu_grad_reference)(gu_TJ, dact_TI, want_act)
