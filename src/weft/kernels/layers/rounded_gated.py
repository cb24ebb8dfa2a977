"""The gated activation of a feed-forward layer beside FP8 products, whose result also comes as rows of 8-bit floats.

`gated`, then `quantise_rows`, to the bit; but one program has a whole row and rounds what it still holds: on an H200
206 us instead of 180 + 88 (8,192 rows of 14,336 columns), and 500 us instead of 386 + 240 on the way back. Rows too
long to be held take the two steps.

A row's result depends on that row alone; see `gated` and `fp8`.

Shape suffixes: T rows, I inner size, J = 2 I.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import jit, next_power_of_2, runs_triton, tl
from weft.kernels.layers.gated import gate, gate_input_grad, gated, gated_grad
from weft.kernels.storage.fp8 import FP8, LARGEST, TINIEST_BITS, Rows8, has_fp8, quantise_rows, size_bits
from weft.plan.families.layer_form import Activation

LONGEST = 16_384
"""Inner size of the longest row that a program holds."""
FORWARD_NUMBERS, BACKWARD_NUMBERS = 32, 16
"""Columns of a thread."""
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
    """f(g) · u of both halves, and its rows in FP8."""
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
