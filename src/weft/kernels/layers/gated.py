"""The gated activation of a feed-forward layer, and its gradient; beside FP8 products also as rows of 8-bit floats.

Forward, with g and u the halves of gu, which includes the adapters' part:
    act = f(g) · u             f(g) = g σ(c(g)): SiLU with c(g) = g, GELU by tanh with c(g) = √(8/π) (g + 0.044715 g³)
Backward, from dact:
    dg = dact · u · σ · (1 + g c'(g) (1 − σ)),    du = dact · f(g)
The backward can compute act again, with the bits of the forward, for the gradients of A of the product that reads it.
Its result is written over gu.

fp32 inside, every result rounded once; nothing is summed. A NaN in another row changes nothing.

`rounded_gated` is `gated`, then `quantise_rows`, to the bit; but one program has a whole row and rounds what it still
holds: on an H200 206 us instead of 180 + 88 (8,192 rows of 14,336 columns), and backward 500 us instead of 386 + 240.
Rows too long to be held take the two steps.

Shape suffixes: T rows, I inner size, J = 2 I.
"""

from __future__ import annotations

import math

import torch

from weft.kernels.launch import cdiv, jit, next_power_of_2, on_device, runs_triton, tl
from weft.kernels.storage import FP8, LARGEST, TINIEST_BITS, Rows8, has_fp8, quantise_rows, size_bits
from weft.plan.decoder import Activation

GELU_FACTOR, GELU_CUBE = math.sqrt(8 / math.pi), 0.044715


def gated_reference(gu_TJ: torch.Tensor, activation: Activation) -> torch.Tensor:
    g_TI, u_TI = gu_TJ.float().chunk(2, dim=1)
    return (g_TI * torch.sigmoid(_curved(g_TI, activation)) * u_TI).to(gu_TJ.dtype)


def gated_grad_reference(
    gu_TJ: torch.Tensor, dact_TI: torch.Tensor, want_act: bool, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor | None]:
    act_TI = gated_reference(gu_TJ, activation) if want_act else None
    g_TI, u_TI = gu_TJ.float().chunk(2, dim=1)
    d_TI, gate_TI = dact_TI.float(), torch.sigmoid(_curved(g_TI, activation))
    slope_TI = g_TI
    if activation == "gelu_tanh":
        slope_TI = g_TI * GELU_FACTOR * (1 + 3 * GELU_CUBE * g_TI * g_TI)
    dg_TI = d_TI * u_TI * gate_TI * (1 + slope_TI * (1 - gate_TI))
    gu_TJ.copy_(torch.cat([dg_TI, d_TI * g_TI * gate_TI], dim=1))
    return gu_TJ, act_TI


def _curved(g_TI: torch.Tensor, activation: Activation) -> torch.Tensor:
    """c(g), of which the gate is the sigmoid."""
    if activation == "silu":
        return g_TI
    return GELU_FACTOR * (g_TI + GELU_CUBE * g_TI * g_TI * g_TI)


BLOCK = {"BM": 64, "BN": 64, "SPAN": 512}
"""Rows and columns of a block, and columns of one program, which takes block after block: so it can load the next one
while it works."""
FORWARD_LAUNCH = {**BLOCK, "num_warps": 8, "num_stages": 3, "maxnreg": 80}
"""Registers limit how many programs run side by side."""
BACKWARD_LAUNCH = {**BLOCK, "num_warps": 4, "num_stages": 3}


@jit
def gate(g, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """σ(c(g)): f(g) is g times it."""
    if GELU:
        return tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    else:
        return tl.sigmoid(g)


@jit
def gate_input_grad(d, g, u, gate_value, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """dg from dact."""
    if GELU:
        slope = g * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        return d * u * gate_value * (1.0 + slope * (1.0 - gate_value))
    else:
        return d * u * gate_value * (1.0 + g * (1.0 - gate_value))


@jit
def _block(x, wide, stride, offset, row_mask, first, edge, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of columns as it is stored. Loaded one round ahead: Triton prefetches only operands of products."""
    columns = first + tl.arange(0, BN)
    mask = row_mask[:, None] & (columns < edge)[None, :]
    return tl.load(x + wide * stride + (offset + columns)[None, :], mask=mask, other=0.0)


@jit
def _gated(  # type: ignore[no-untyped-def]
    gu,
    act,
    stride_x,
    num_rows,
    num_inner,
    GELU: tl.constexpr,
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
        value = g * gate(g, GELU) * u
        tl.store(act + wide * num_inner + columns[None, :], value.to(act.dtype.element_ty), mask=mask)


@jit
def _gated_grad(  # type: ignore[no-untyped-def]
    gu,
    dact,
    act,
    stride_x,
    stride_d,
    num_rows,
    num_inner,
    WANT_ACT: tl.constexpr,
    GELU: tl.constexpr,
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
        gate_value = gate(g, GELU)
        activated = g * gate_value
        out = gu + wide * stride_x + columns[None, :]
        tl.store(out, gate_input_grad(d, g, u, gate_value, GELU).to(gu.dtype.element_ty), mask=mask)
        tl.store(out + num_inner, (d * activated).to(gu.dtype.element_ty), mask=mask)
        if WANT_ACT:
            value = (activated * u).to(act.dtype.element_ty)
            tl.store(act + wide * num_inner + columns[None, :], value, mask=mask)


def _grid(num_rows: int, num_inner: int) -> tuple[int, int]:
    return cdiv(num_inner, BLOCK["SPAN"]), cdiv(num_rows, BLOCK["BM"])


def gated_kernel(gu_TJ: torch.Tensor, activation: Activation) -> torch.Tensor:
    num_rows, num_inner = gu_TJ.shape[0], gu_TJ.shape[1] // 2
    act_TI = torch.empty((num_rows, num_inner), dtype=gu_TJ.dtype, device=gu_TJ.device)
    _gated[_grid(num_rows, num_inner)](
        gu_TJ, act_TI, gu_TJ.stride(0), num_rows, num_inner, GELU=activation == "gelu_tanh", **FORWARD_LAUNCH
    )
    return act_TI


def gated_grad_kernel(
    gu_TJ: torch.Tensor, dact_TI: torch.Tensor, want_act: bool, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_rows, num_inner = dact_TI.shape
    act_TI = torch.empty_like(dact_TI, memory_format=torch.contiguous_format) if want_act else None
    _gated_grad[_grid(num_rows, num_inner)](
        gu_TJ,
        dact_TI,
        gu_TJ if act_TI is None else act_TI,
        gu_TJ.stride(0),
        dact_TI.stride(0),
        num_rows,
        num_inner,
        WANT_ACT=want_act,
        GELU=activation == "gelu_tanh",
        **BACKWARD_LAUNCH,
    )
    return gu_TJ, act_TI


gated = on_device(gated_kernel, gated_reference)
"""f(g) · u of both halves."""


gated_grad = on_device(gated_grad_kernel, gated_grad_reference)
"""(dgu, act): the gradient of gu, written over gu; act again, where requested."""


LONGEST = 16_384
FORWARD_NUMBERS, BACKWARD_NUMBERS = 32, 16
REGISTERS = 64
"""Registers of a thread: with more, fewer threads have work at the same time."""


@jit
def _rounded_gated(  # type: ignore[no-untyped-def]
    gu,
    act,
    q,
    scale,
    stride_x,
    num_inner,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < num_inner
    gu += row * stride_x
    g = tl.load(gu + lane, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu + num_inner + lane, mask=inside, other=0.0).to(tl.float32)
    value = (g * gate(g, GELU) * u).to(act.dtype.element_ty)
    tl.store(act + row * num_inner + lane, value, mask=inside)
    x = value.to(tl.float32)
    amax = tl.maximum(tl.max(size_bits(x), axis=0), FLOOR_BITS).to(tl.float32, bitcast=True)
    tl.store(q + row * num_inner + lane, (x * tl.div_rn(LIMIT, amax)).to(tl.float8e4nv), mask=inside)
    tl.store(scale + row, tl.div_rn(amax, LIMIT))


@jit
def _rounded_gated_grad(  # type: ignore[no-untyped-def]
    gu,
    dact,
    act,
    columns,
    q,
    scale,
    stride_x,
    stride_d,
    num_inner,
    WANT_ACT: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < num_inner
    gu += row * stride_x
    g = tl.load(gu + lane, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu + num_inner + lane, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dact + row * stride_d + lane, mask=inside, other=0.0).to(tl.float32)
    gate_value = gate(g, GELU)
    activated = g * gate_value
    dg = gate_input_grad(d, g, u, gate_value, GELU).to(gu.dtype.element_ty)
    du = (d * activated).to(gu.dtype.element_ty)
    if WANT_ACT:
        tl.store(act + row * num_inner + lane, (activated * u).to(act.dtype.element_ty), mask=inside)
    tl.store(gu + lane, dg, mask=inside)
    tl.store(gu + num_inner + lane, du, mask=inside)
    xg = dg.to(tl.float32) * tl.load(columns + lane, mask=inside, other=0.0)
    xu = du.to(tl.float32) * tl.load(columns + num_inner + lane, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(size_bits(xg), axis=0), tl.max(size_bits(xu), axis=0))
    amax = tl.maximum(largest, FLOOR_BITS).to(tl.float32, bitcast=True)
    factor = tl.div_rn(LIMIT, amax)
    q += row * 2 * num_inner
    tl.store(q + lane, (xg * factor).to(tl.float8e4nv), mask=inside)
    tl.store(q + num_inner + lane, (xu * factor).to(tl.float8e4nv), mask=inside)
    tl.store(scale + row, tl.div_rn(amax, LIMIT))


def _launch(num_inner: int, numbers: int) -> dict[str, int | float]:
    block = next_power_of_2(num_inner)
    num_warps = min(32, max(4, block // (32 * numbers)))
    return {
        "BLOCK": block,
        "LIMIT": LARGEST,
        "FLOOR_BITS": TINIEST_BITS,
        "num_warps": num_warps,
        "maxnreg": REGISTERS,
    }


def _rows8(num_rows: int, num_columns: int, device: torch.device) -> Rows8:
    q_TK = torch.empty(num_rows, num_columns, dtype=FP8, device=device)
    return Rows8(q_TK, torch.empty(num_rows, dtype=torch.float32, device=device))


def rounded_gated_kernel(gu_TJ: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, Rows8]:
    num_rows, num_inner = gu_TJ.shape[0], gu_TJ.shape[1] // 2
    act_TI = torch.empty((num_rows, num_inner), dtype=gu_TJ.dtype, device=gu_TJ.device)
    act8 = _rows8(num_rows, num_inner, gu_TJ.device)
    launch = _launch(num_inner, FORWARD_NUMBERS)
    _rounded_gated[(num_rows,)](
        gu_TJ, act_TI, *act8, gu_TJ.stride(0), num_inner, GELU=activation == "gelu_tanh", **launch
    )
    return act_TI, act8


def rounded_gated_grad_kernel(
    gu_TJ: torch.Tensor, dact_TI: torch.Tensor, want_act: bool, columns_J: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor | None, Rows8]:
    num_rows, num_inner = dact_TI.shape
    act_TI = torch.empty_like(dact_TI, memory_format=torch.contiguous_format) if want_act else None
    dgu8 = _rows8(num_rows, 2 * num_inner, gu_TJ.device)
    _rounded_gated_grad[(num_rows,)](
        gu_TJ,
        dact_TI,
        gu_TJ if act_TI is None else act_TI,
        columns_J,
        *dgu8,
        gu_TJ.stride(0),
        dact_TI.stride(0),
        num_inner,
        WANT_ACT=want_act,
        GELU=activation == "gelu_tanh",
        **_launch(num_inner, BACKWARD_NUMBERS),
    )
    return gu_TJ, act_TI, dgu8


def _is_held(gu_TJ: torch.Tensor) -> bool:
    return runs_triton(gu_TJ) and has_fp8(gu_TJ.device) and gu_TJ.shape[1] // 2 <= LONGEST


def rounded_gated(gu_TJ: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, Rows8]:
    if _is_held(gu_TJ):
        return rounded_gated_kernel(gu_TJ, activation)
    act_TI = gated(gu_TJ, activation)
    return act_TI, quantise_rows(act_TI)


def rounded_gated_grad(
    gu_TJ: torch.Tensor, dact_TI: torch.Tensor, want_act: bool, columns_J: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor | None, Rows8]:
    """(dgu, act, rows of dgu · columns in FP8): the gradient of gu, written over gu; act again, if requested."""
    if _is_held(gu_TJ):
        return rounded_gated_grad_kernel(gu_TJ, dact_TI, want_act, columns_J, activation)
    dgu_TJ, act_TI = gated_grad(gu_TJ, dact_TI, want_act, activation)
    return dgu_TJ, act_TI, quantise_rows(dgu_TJ, columns_J)
