"""The adapters' part of a block of a frozen product: device functions that add it run by run.

A run is neighbouring rows with one owner; a block of rows has one run or several. For the part m of a site:
    out: S_m B_mᵀ                added to the run's rows of a block of outputs
    in:  Σ_m drop_m(dS_m A_m)    added to the run's rows of a block of inputs
Rows are selected, not multiplied by zero, so nothing of a neighbour can reach them. An owner's numbers are read apart
from their use: a product loads those of a block's first run before its sums, and has them after.
"""

from __future__ import annotations

from weft.kernels.launch import jit, tl
from weft.kernels.lora.tile import (
    drop,
    drop_threshold,
    in_block,
    line_of,
    out_block,
    part_column,
    part_width,
    rank_tile,
    weight_a,
    weight_b,
)


@jit
def out_owner(table, runs, run, module, num_modules, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A run of rows, and the location of its owner's ranks at a module."""
    start, end, slot = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1), tl.load(runs + run * 4 + 2)
    line = line_of(table, slot, module, num_modules)
    return start, end, part_width(line), part_column(line), weight_b(line, dtype)


@jit
def out_ranks(  # type: ignore[no-untyped-def]
    like,
    s,
    stride_s,
    owner,
    rows,
    mine,
    columns,
    inside,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """S Bᵀ of one owner, for rows that are `mine`."""
    _, _, width, column, b = owner
    if width <= NARROW:
        s_tile = rank_tile(s, stride_s, column, width, 0, rows, mine, NARROW)
        delta = out_block(s_tile, b, width, 0, columns, inside, NARROW)
    else:
        delta = tl.zeros_like(like)
        for r in tl.range(0, width, WIDE, num_stages=2):
            s_tile = rank_tile(s, stride_s, column, width, r, rows, mine, WIDE)
            delta += out_block(s_tile, b, width, r, columns, inside, WIDE)
    return delta


@jit
def add_all_out(  # type: ignore[no-untyped-def]
    half,
    s,
    stride_s,
    owner,
    table,
    runs,
    first,
    last,
    module,
    num_modules,
    row,
    columns,
    size,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Half a block from `row` on with the parts of all its runs; `owner` is the first one's; `columns` count within the
    module's outputs."""
    rows = row + tl.arange(0, half.shape[0])
    inside = columns < size
    if last - first == 1:
        # One owner, as most blocks have: nothing to select. Beyond the last row nothing is stored.
        if owner[2] > 0:
            half += out_ranks(half, s, stride_s, owner, rows, rows < owner[1], columns, inside, NARROW, WIDE)
    else:
        for run in range(first, last):
            other = out_owner(table, runs, run, module, num_modules, s.dtype.element_ty)
            if other[2] > 0:
                mine = (rows >= other[0]) & (rows < other[1])
                delta = out_ranks(half, s, stride_s, other, rows, mine, columns, inside, NARROW, WIDE)
                half += tl.where(mine[:, None], delta, 0.0)
    return half


@jit
def in_owner(  # type: ignore[no-untyped-def]
    table, runs, run, module, num_modules, dtype: tl.constexpr, NUM_PARTS: tl.constexpr
):
    """A run of rows, its owner's ranks at all parts of a site together, its dropout's threshold, and its slot."""
    start, end, slot = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1), tl.load(runs + run * 4 + 2)
    whole = 0
    a = tl.load(line_of(table, slot, module, num_modules) + 2)
    threshold = 0
    for part in tl.static_range(NUM_PARTS):
        line = line_of(table, slot, module + part, num_modules)
        width = part_width(line)
        a = tl.where((whole == 0) & (width > 0), tl.load(line + 2), a)
        whole += width
        threshold = tl.maximum(threshold, drop_threshold(line))
    return start, end, whole, tl.multiple_of(a.to(tl.pointer_type(dtype)), 16), threshold, slot


@jit
def _in_ranks(  # type: ignore[no-untyped-def]
    like,
    ds,
    stride_s,
    column,
    width,
    a,
    rows,
    mine,
    features,
    num_features,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dS A over `width` ranks from a column of dS on."""
    if width <= NARROW:
        ds_tile = rank_tile(ds, stride_s, column, width, 0, rows, mine, NARROW)
        delta = in_block(ds_tile, a, width, 0, features, num_features, NARROW)
    else:
        delta = tl.zeros_like(like)
        for r in tl.range(0, width, WIDE, num_stages=2):
            ds_tile = rank_tile(ds, stride_s, column, width, r, rows, mine, WIDE)
            delta += in_block(ds_tile, a, width, r, features, num_features, WIDE)
    return delta


@jit
def _in_parts(  # type: ignore[no-untyped-def]
    half,
    ds,
    stride_s,
    owner,
    row_keys,
    table,
    module,
    num_modules,
    rows,
    mine,
    features,
    num_features,
    SELECTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    DROPS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Half a block with Σ drop(dS A) of one owner added to it, of several if it SELECTS rows that are `mine`."""
    _, _, whole, a_whole, threshold, slot = owner
    if NUM_PARTS > 1 and DROPS and threshold > 0:
        for part in tl.static_range(NUM_PARTS):
            line = line_of(table, slot, module + part, num_modules)
            width, column, a = part_width(line), part_column(line), weight_a(line, ds.dtype.element_ty)
            delta = _in_ranks(half, ds, stride_s, column, width, a, rows, mine, features, num_features, NARROW, WIDE)
            delta = drop(delta, line, threshold, row_keys, features)
            half += tl.where(mine[:, None], delta, 0.0) if SELECTS else delta
    else:
        # The parts' A lie one after another, so all of them are one product.
        delta = _in_ranks(half, ds, stride_s, 0, whole, a_whole, rows, mine, features, num_features, NARROW, WIDE)
        if NUM_PARTS == 1 and DROPS:
            delta = drop(delta, line_of(table, slot, module, num_modules), threshold, row_keys, features)
        half += tl.where(mine[:, None], delta, 0.0) if SELECTS else delta
    return half


@jit
def add_all_in(  # type: ignore[no-untyped-def]
    half,
    ds,
    stride_s,
    owner,
    row_keys,
    table,
    runs,
    first,
    last,
    module,
    num_modules,
    row,
    features,
    num_in,
    NUM_PARTS: tl.constexpr,
    DROPS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Half a block from `row` on with the parts of all its runs; `owner` is that of the first."""
    rows = row + tl.arange(0, half.shape[0])
    if last - first == 1:
        if owner[2] > 0:
            half = _in_parts(
                half, ds, stride_s, owner, row_keys, table, module, num_modules, rows, rows < owner[1], features,
                num_in, False, NUM_PARTS, DROPS, NARROW, WIDE,
            )  # fmt: skip
    else:
        for run in range(first, last):
            other = in_owner(table, runs, run, module, num_modules, ds.dtype.element_ty, NUM_PARTS)
            if other[2] > 0:
                mine = (rows >= other[0]) & (rows < other[1])
                half = _in_parts(
                    half, ds, stride_s, other, row_keys, table, module, num_modules, rows, mine, features,
                    num_in, True, NUM_PARTS, DROPS, NARROW, WIDE,
                )  # fmt: skip
    return half
