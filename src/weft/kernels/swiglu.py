"""The gated activation of a feed-forward layer, with the adapters' part of gate and up, and its gradient.

Forward, with g and u the halves of the frozen product gu and S Bᵀ what the adapters add to each:
    act = silu(g) · u                          g = gu[:, :I] + S_g B_gᵀ, u = gu[:, I:] + S_u B_uᵀ, silu(g) = g σ(g)
Backward, with dact the gradient by the frozen product that reads act and drop(dS A) by the adapters that read it:
    d  = dact + drop(dS A)
    dg = d · u · σ(g) · (1 + g (1 − σ(g))),    du = d · silu(g)
The forward leaves gu as it is: the backward adds S Bᵀ again, and can make act again on the way, with the bits of the
forward, for the gradients of A of the product that reads it. Its result takes gu's place in memory.

fp32 inside, every result rounded once; nothing is summed but over ranks. A row meets only itself and its owner's A and
B: a NaN in another row or slot changes nothing.

Shape suffixes: T rows, I inner size, J = 2 I.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.kernels.expand import expand_grad_reference, expand_reference
from weft.kernels.launch import cdiv, jit, lanes, runs_triton, tl
from weft.kernels.tables import ROW_TILE, Delta, RankLaunch
from weft.kernels.tile import (
    drop_threshold,
    dropped,
    in_delta,
    is_mine,
    line_of,
    out_delta,
    part_column,
    part_width,
    rank_tile,
    weight_a,
    weight_b,
)
from weft.kernels.tuning import swiglu_blocks


def swiglu_reference(gu_TJ: torch.Tensor, delta: Delta | None) -> torch.Tensor:
    """The plain torch twin of `swiglu`."""
    g_TI, u_TI = _halves(gu_TJ, delta)
    return (g_TI * torch.sigmoid(g_TI) * u_TI).to(gu_TJ.dtype)


def swiglu_grad_reference(
    gu_TJ: torch.Tensor, delta: Delta | None, dact_TI: torch.Tensor, down_delta: Delta | None, want_act: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The plain torch twin of `swiglu_grad`."""
    g_TI, u_TI = _halves(gu_TJ, delta)
    d_TI = dact_TI.to(torch.float32, copy=True)
    if down_delta is not None:
        expand_grad_reference(d_TI, down_delta.s_TR, down_delta.site, down_delta.rows, down_delta.table)
    gate_TI = torch.sigmoid(g_TI)
    dg_TI = d_TI * u_TI * gate_TI * (1 + g_TI * (1 - gate_TI))
    gu_TJ.copy_(torch.cat([dg_TI, d_TI * g_TI * gate_TI], dim=1))
    return gu_TJ, (g_TI * gate_TI * u_TI).to(gu_TJ.dtype) if want_act else None


def _halves(gu_TJ: torch.Tensor, delta: Delta | None) -> tuple[torch.Tensor, torch.Tensor]:
    sum_TJ = gu_TJ.to(torch.float32, copy=True)
    if delta is not None:
        expand_reference(sum_TJ, delta.s_TR, delta.site, delta.rows, delta.table)
    g_TI, u_TI = sum_TJ.chunk(2, dim=1)
    return g_TI, u_TI


SPAN = 512
"""Columns of one program, one block after another: it looks its owner up and reads S once for all of them. Alone, each
block of 64 would wait for those look-ups; on an H200 that took 363 us where this takes 218 (8192 x 14336, rank 16)."""


def _launches(delta: Delta | None, device: torch.device, *, backward: bool) -> list[dict[str, int]]:
    """The launch options for each class of ranks."""
    sizes = {"SPAN": SPAN, "BM": ROW_TILE}
    launches = (RankLaunch(-1, 16),) if delta is None else delta.table.launches
    return [{**swiglu_blocks(launch.upto, device, backward=backward), **launch.bounds, **sizes} for launch in launches]


@jit
def _tile(tiles, num_rows, TILED: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row, end and slot of this program's rows: a tile of the table, or plain blocks without adapters."""
    if TILED:
        tile = tiles + tl.program_id(1) * 4
        return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    else:
        return tl.program_id(1) * BM, num_rows, 0


@jit
def _block(x, wide, stride, offset, row_mask, first, edge, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of columns as it is stored. Asked for one round before it is used: Triton loads ahead by itself only what
    goes into a product."""
    columns = first + tl.arange(0, BN)
    mask = row_mask[:, None] & (columns < edge)[None, :]
    return tl.load(x + wide * stride + (offset + columns)[None, :], mask=mask, other=0.0)


@jit
def _forward_columns(  # type: ignore[no-untyped-def]
    gu,
    act,
    s,
    stride_x,
    stride_s,
    rows,
    row_mask,
    num_inner,
    s_g,
    column_g,
    width_g,
    b_g,
    s_u,
    column_u,
    width_u,
    b_u,
    HAS_DELTA: tl.constexpr,
    SPAN: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    """A program's columns, block by block."""
    wide = rows.to(tl.int64)[:, None]
    begin = tl.program_id(0) * SPAN
    edge = tl.minimum(begin + SPAN, num_inner)
    next_g = _block(gu, wide, stride_x, 0, row_mask, begin, edge, BN)
    next_u = _block(gu, wide, stride_x, num_inner, row_mask, begin, edge, BN)
    for c in range(begin, begin + SPAN, BN):
        columns = c + tl.arange(0, BN)
        inside = columns < num_inner
        g, u = next_g.to(tl.float32), next_u.to(tl.float32)
        next_g = _block(gu, wide, stride_x, 0, row_mask, c + BN, edge, BN)
        next_u = _block(gu, wide, stride_x, num_inner, row_mask, c + BN, edge, BN)
        if HAS_DELTA:
            g += out_delta(s_g, s, stride_s, column_g, width_g, b_g, rows, row_mask, columns, inside, BR, RANK_BLOCKS)
            u += out_delta(s_u, s, stride_s, column_u, width_u, b_u, rows, row_mask, columns, inside, BR, RANK_BLOCKS)
        value = g * tl.sigmoid(g) * u
        mask = row_mask[:, None] & inside[None, :]
        tl.store(act + wide * num_inner + columns[None, :], value.to(act.dtype.element_ty), mask=mask)


@jit
def _swiglu(  # type: ignore[no-untyped-def]
    gu,
    act,
    s,
    table,
    tiles,
    stride_x,
    stride_s,
    module,
    num_modules,
    num_rows,
    num_inner,
    HAS_DELTA: tl.constexpr,
    ABOVE: tl.constexpr,
    UPTO: tl.constexpr,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    start, end, slot = _tile(tiles, num_rows, HAS_DELTA, BM)
    if end <= start:
        return
    rows = start + tl.arange(0, BM)
    row_mask = rows < end
    if HAS_DELTA:
        if not is_mine(table, slot, module, num_modules, ABOVE, UPTO):
            return
        line_g = line_of(table, slot, module, num_modules)
        line_u = line_of(table, slot, module + 1, num_modules)
        width_g, column_g, b_g = part_width(line_g), part_column(line_g), weight_b(line_g, s.dtype.element_ty)
        width_u, column_u, b_u = part_width(line_u), part_column(line_u), weight_b(line_u, s.dtype.element_ty)
        s_g = rank_tile(s, stride_s, column_g, width_g, 0, rows, row_mask, BR)
        s_u = rank_tile(s, stride_s, column_u, width_u, 0, rows, row_mask, BR)
        _forward_columns(
            gu, act, s, stride_x, stride_s, rows, row_mask, num_inner, s_g, column_g, width_g, b_g, s_u, column_u,
            width_u, b_u, True, SPAN, BN, BR, RANK_BLOCKS,
        )  # fmt: skip
    else:
        _forward_columns(
            gu, act, s, stride_x, stride_s, rows, row_mask, num_inner, 0, 0, 0, 0, 0, 0, 0, 0, False, SPAN, BN, BR, 1
        )


@jit
def _backward_columns(  # type: ignore[no-untyped-def]
    gu,
    dact,
    act,
    s,
    ds,
    keys,
    stride_x,
    stride_d,
    stride_s,
    stride_ds,
    rows,
    row_mask,
    num_inner,
    s_g,
    column_g,
    width_g,
    b_g,
    s_u,
    column_u,
    width_u,
    b_u,
    s_d,
    column_d,
    width_d,
    a_d,
    line_d,
    HAS_DELTA: tl.constexpr,
    HAS_DOWN: tl.constexpr,
    DROPS: tl.constexpr,
    WANT_ACT: tl.constexpr,
    SPAN: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    """A program's columns, block by block."""
    wide = rows.to(tl.int64)[:, None]
    begin = tl.program_id(0) * SPAN
    edge = tl.minimum(begin + SPAN, num_inner)
    next_g = _block(gu, wide, stride_x, 0, row_mask, begin, edge, BN)
    next_u = _block(gu, wide, stride_x, num_inner, row_mask, begin, edge, BN)
    next_d = _block(dact, wide, stride_d, 0, row_mask, begin, edge, BN)
    for c in range(begin, begin + SPAN, BN):
        columns = c + tl.arange(0, BN)
        inside = columns < num_inner
        mask = row_mask[:, None] & inside[None, :]
        g, u, d = next_g.to(tl.float32), next_u.to(tl.float32), next_d.to(tl.float32)
        next_g = _block(gu, wide, stride_x, 0, row_mask, c + BN, edge, BN)
        next_u = _block(gu, wide, stride_x, num_inner, row_mask, c + BN, edge, BN)
        next_d = _block(dact, wide, stride_d, 0, row_mask, c + BN, edge, BN)
        if HAS_DELTA:
            g += out_delta(s_g, s, stride_s, column_g, width_g, b_g, rows, row_mask, columns, inside, BR, RANK_BLOCKS)
            u += out_delta(s_u, s, stride_s, column_u, width_u, b_u, rows, row_mask, columns, inside, BR, RANK_BLOCKS)
        if HAS_DOWN:
            delta = in_delta(
                s_d, ds, stride_ds, column_d, width_d, a_d, rows, row_mask, columns, num_inner, BR, RANK_BLOCKS
            )
            d += dropped(delta, line_d, keys, rows, row_mask, columns) if DROPS else delta
        gate = tl.sigmoid(g)
        silu = g * gate
        out = gu + wide * stride_x + columns[None, :]
        tl.store(out, (d * u * gate * (1.0 + g * (1.0 - gate))).to(gu.dtype.element_ty), mask=mask)
        tl.store(out + num_inner, (d * silu).to(gu.dtype.element_ty), mask=mask)
        if WANT_ACT:
            value = (silu * u).to(act.dtype.element_ty)
            tl.store(act + wide * num_inner + columns[None, :], value, mask=mask)


@jit
def _swiglu_grad(  # type: ignore[no-untyped-def]
    gu,
    dact,
    act,
    s,
    ds,
    table,
    tiles,
    keys,
    stride_x,
    stride_d,
    stride_s,
    stride_ds,
    module,
    down_module,
    num_modules,
    num_rows,
    num_inner,
    ADAPTED: tl.constexpr,
    DROPS: tl.constexpr,
    WANT_ACT: tl.constexpr,
    ABOVE: tl.constexpr,
    UPTO: tl.constexpr,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    start, end, slot = _tile(tiles, num_rows, ADAPTED, BM)
    if end <= start:
        return
    rows = start + tl.arange(0, BM)
    row_mask = rows < end
    if ADAPTED:
        if not is_mine(table, slot, module, num_modules, ABOVE, UPTO):
            return
        line_g = line_of(table, slot, module, num_modules)
        line_u = line_of(table, slot, module + 1, num_modules)
        line_d = line_of(table, slot, down_module, num_modules)
        width_g, column_g, b_g = part_width(line_g), part_column(line_g), weight_b(line_g, s.dtype.element_ty)
        width_u, column_u, b_u = part_width(line_u), part_column(line_u), weight_b(line_u, s.dtype.element_ty)
        width_d, column_d, a_d = part_width(line_d), part_column(line_d), weight_a(line_d, ds.dtype.element_ty)
        s_g = rank_tile(s, stride_s, column_g, width_g, 0, rows, row_mask, BR)
        s_u = rank_tile(s, stride_s, column_u, width_u, 0, rows, row_mask, BR)
        s_d = rank_tile(ds, stride_ds, column_d, width_d, 0, rows, row_mask, BR)
        drops = False
        if DROPS:
            drops = drop_threshold(line_d) > 0
        if drops:
            _backward_columns(
                gu, dact, act, s, ds, keys, stride_x, stride_d, stride_s, stride_ds, rows, row_mask, num_inner,
                s_g, column_g, width_g, b_g, s_u, column_u, width_u, b_u, s_d, column_d, width_d, a_d, line_d,
                True, True, DROPS, WANT_ACT, SPAN, BN, BR, RANK_BLOCKS,
            )  # fmt: skip
        else:
            _backward_columns(
                gu, dact, act, s, ds, keys, stride_x, stride_d, stride_s, stride_ds, rows, row_mask, num_inner,
                s_g, column_g, width_g, b_g, s_u, column_u, width_u, b_u, s_d, column_d, width_d, a_d, line_d,
                True, True, False, WANT_ACT, SPAN, BN, BR, RANK_BLOCKS,
            )  # fmt: skip
    else:
        _backward_columns(
            gu, dact, act, s, ds, keys, stride_x, stride_d, stride_s, stride_ds, rows, row_mask, num_inner,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, False, False, False, WANT_ACT, SPAN, BN, BR, 1,
        )  # fmt: skip


def _grid(num_rows: int, num_inner: int, delta: Delta | None) -> tuple[int, int]:
    num_tiles = cdiv(num_rows, ROW_TILE) if delta is None else len(delta.rows.tiles_N4)
    return cdiv(num_inner, SPAN), num_tiles


def swiglu_kernel(gu_TJ: torch.Tensor, delta: Delta | None) -> torch.Tensor:
    """`swiglu` by its Triton kernel."""
    num_rows, num_inner = gu_TJ.shape[0], gu_TJ.shape[1] // 2
    act_TI = torch.empty((num_rows, num_inner), dtype=gu_TJ.dtype, device=gu_TJ.device)
    adapters: tuple[Any, ...] = (gu_TJ, gu_TJ, gu_TJ)
    place: tuple[int, ...] = (0, 0, 0)
    if delta is not None:
        assert delta.site.sizes == (num_inner, num_inner)
        adapters = (delta.s_TR, delta.table.device_SMF, delta.rows.tiles_N4)
        place = (delta.s_TR.stride(0), delta.site.module, delta.table.num_modules)
    for launch in lanes(_launches(delta, gu_TJ.device, backward=False), gu_TJ.device):
        _swiglu[_grid(num_rows, num_inner, delta)](
            gu_TJ,
            act_TI,
            *adapters,
            gu_TJ.stride(0),
            *place,
            num_rows,
            num_inner,
            HAS_DELTA=delta is not None,
            **launch,
        )
    return act_TI


def swiglu_grad_kernel(
    gu_TJ: torch.Tensor, delta: Delta | None, dact_TI: torch.Tensor, down_delta: Delta | None, want_act: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`swiglu_grad` by its Triton kernel."""
    num_rows, num_inner = dact_TI.shape
    act_TI = torch.empty_like(dact_TI, memory_format=torch.contiguous_format) if want_act else None
    adapters: tuple[Any, ...] = (gu_TJ,) * 5
    strides, place = (0, 0), (0, 0, 0)
    if delta is not None and down_delta is not None:
        assert delta.rows is down_delta.rows and delta.site.sizes == (num_inner, num_inner)
        assert (len(down_delta.site.sizes), down_delta.site.num_in) == (1, num_inner)
        tables = (delta.table.device_SMF, delta.rows.tiles_N4, delta.rows.keys_T)
        adapters = (delta.s_TR, down_delta.s_TR, *tables)
        strides = (delta.s_TR.stride(0), down_delta.s_TR.stride(0))
        place = (delta.site.module, down_delta.site.module, delta.table.num_modules)
    for launch in lanes(_launches(delta, gu_TJ.device, backward=True), gu_TJ.device):
        _swiglu_grad[_grid(num_rows, num_inner, delta)](
            gu_TJ,
            dact_TI,
            gu_TJ if act_TI is None else act_TI,
            *adapters,
            gu_TJ.stride(0),
            dact_TI.stride(0),
            *strides,
            *place,
            num_rows,
            num_inner,
            ADAPTED=delta is not None,
            DROPS=delta is not None and delta.table.drops and delta.rows.drops,
            WANT_ACT=want_act,
            **launch,
        )
    return gu_TJ, act_TI


def swiglu(gu_TJ: torch.Tensor, delta: Delta | None) -> torch.Tensor:
    """silu(g) · u of both halves, each with the adapters' part."""
    return (swiglu_kernel if runs_triton(gu_TJ) else swiglu_reference)(gu_TJ, delta)


def swiglu_grad(
    gu_TJ: torch.Tensor, delta: Delta | None, dact_TI: torch.Tensor, down_delta: Delta | None, want_act: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dgu, act): the gradient of gu, with what the adapters on act's reader add to `dact`; act again, where wanted.

    dgu is written over gu.
    """
    assert (delta is None) == (down_delta is None), "a microbatch has adapters or it has none"
    run = swiglu_grad_kernel if runs_triton(gu_TJ) else swiglu_grad_reference
    return run(gu_TJ, delta, dact_TI, down_delta, want_act)
