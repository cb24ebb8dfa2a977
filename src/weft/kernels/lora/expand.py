"""From rank space back to activations, for all owners of a microbatch in one launch.

Forward, for the rows of one owner and each part m of a site (B_m holds scale · B):
    y_m += S_m B_mᵀ                  (T, O_m)
Backward:
    dx += Σ_m drop_m(dS_m A_m)       (T, D), parts in order
Sums over rank in fp32, added to the bf16 number and rounded once. A tile has one owner: a NaN in another row or slot
changes nothing. For GPUs and shapes whose frozen products cannot add the part themselves (`kernels/lora/product.py`).

With `adds` false the sum over ranks overwrites the output, and rows without an adapter become zero: a product that adds
to its output then comes second, and y is written and read once less.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, lanes, on_device, tl
from weft.kernels.lora.tables import ROW_TILE, RowTables, Site, SlotTable
from weft.kernels.lora.tile import (
    drop_threshold,
    dropped,
    in_block,
    in_delta,
    is_mine,
    line_of,
    out_delta,
    part_bounds,
    part_column,
    part_of_block,
    part_width,
    rank_tile,
    weight_a,
    weight_b,
)
from weft.kernels.tuning import expand_blocks, expand_grad_blocks


def expand_reference(
    y_TO: torch.Tensor, s_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, adds: bool = True
) -> None:
    if not adds:
        y_TO.zero_()
    for span in rows.spans:
        mine = slice(span.start, span.end)
        for start, size, (column, rank, entry) in zip(
            site.starts, site.sizes, table.columns(span.slot, site), strict=True
        ):
            if entry is not None:
                y_TO[mine, start : start + size] += s_TR[mine, column : column + rank] @ entry.b_OP[:, :rank].t()


def expand_grad_reference(
    dx_TD: torch.Tensor, ds_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, adds: bool = True
) -> None:
    if not adds:
        dx_TD.zero_()
    for span in rows.spans:
        mine = slice(span.start, span.end)
        for column, rank, entry in table.columns(span.slot, site):
            if entry is not None:
                delta_LD = ds_TR[mine, column : column + rank] @ entry.a_PD[:rank]
                dx_TD[mine] += rows.dropped(entry, delta_LD, mine)


@jit
def _expand(  # type: ignore[no-untyped-def]
    y,
    s,
    table,
    tiles,
    stride_y,
    stride_s,
    module,
    num_modules,
    size_0,
    size_1,
    size_2,
    ADDS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ABOVE: tl.constexpr,
    UPTO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * 4
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if not is_mine(table, slot, module, num_modules, ABOVE, UPTO):
        return
    part, block = part_of_block(tl.program_id(0), size_0, size_1, NUM_PARTS, BN)
    begin, size = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
    line = line_of(table, slot, module + part, num_modules)
    width = part_width(line)
    if (end <= start) | (ADDS & (width == 0)):
        return
    rows = start + tl.arange(0, BM)
    row_mask = rows < end
    columns = block * BN + tl.arange(0, BN)
    inside = columns < size
    column, b = part_column(line), weight_b(line, s.dtype.element_ty)
    s_tile = rank_tile(s, stride_s, column, width, 0, rows, row_mask, BR)
    delta = out_delta(s_tile, s, stride_s, column, width, b, rows, row_mask, columns, inside, BR, RANK_BLOCKS)
    out = y + rows.to(tl.int64)[:, None] * stride_y + (begin + columns)[None, :]
    mask = row_mask[:, None] & inside[None, :]
    if ADDS:
        delta += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, delta.to(y.dtype.element_ty), mask=mask)


@jit
def _expand_grad(  # type: ignore[no-untyped-def]
    dx,
    ds,
    table,
    tiles,
    keys,
    stride_x,
    stride_s,
    module,
    num_modules,
    num_features,
    ADDS: tl.constexpr,
    DROPS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ABOVE: tl.constexpr,
    UPTO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * 4
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if (end <= start) | (ADDS & (slot == 0)):
        return
    if not is_mine(table, slot, module, num_modules, ABOVE, UPTO):
        return
    rows = start + tl.arange(0, BM)
    row_mask = rows < end
    features = tl.program_id(0) * BN + tl.arange(0, BN)
    out = dx + rows.to(tl.int64)[:, None] * stride_x + features[None, :]
    mask = row_mask[:, None] & (features < num_features)[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if ADDS:
        before = tl.load(out, mask=mask, other=0.0)
    whole = 0
    a_whole = tl.load(line_of(table, slot, module, num_modules) + 2)
    any_dropped = False
    for part in tl.static_range(NUM_PARTS):
        line = line_of(table, slot, module + part, num_modules)
        width = part_width(line)
        a_whole = tl.where((whole == 0) & (width > 0), tl.load(line + 2), a_whole)
        whole += width
        any_dropped = any_dropped | (drop_threshold(line) > 0)
    if DROPS and any_dropped:
        for part in tl.static_range(NUM_PARTS):
            line = line_of(table, slot, module + part, num_modules)
            width, column, a = part_width(line), part_column(line), weight_a(line, ds.dtype.element_ty)
            ds_tile = rank_tile(ds, stride_s, column, width, 0, rows, row_mask, BR)
            delta = in_delta(
                ds_tile, ds, stride_s, column, width, a, rows, row_mask, features, num_features, BR, RANK_BLOCKS
            )
            total += dropped(delta, line, keys, rows, row_mask, features)
    else:
        # The parts' A lie one after another, so all of them are one product.
        a = tl.multiple_of(a_whole.to(tl.pointer_type(ds.dtype.element_ty)), 16)
        for r in range(0, whole, BR):
            ds_tile = rank_tile(ds, stride_s, 0, whole, r, rows, row_mask, BR)
            total += in_block(ds_tile, a, whole, r, features, num_features, BR)
    if ADDS:
        total += before.to(tl.float32)
    tl.store(out, total.to(dx.dtype.element_ty), mask=mask)


def expand_kernel(
    y_TO: torch.Tensor, s_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, adds: bool = True
) -> None:
    for launch in lanes(table.launches, y_TO.device):
        blocks = expand_blocks(launch.upto, y_TO.device)
        num_blocks = sum(cdiv(size, blocks["BN"]) for size in site.sizes)
        _expand[(num_blocks, len(rows.tiles_N4))](
            y_TO,
            s_TR,
            table.device_SMF,
            rows.tiles_N4,
            y_TO.stride(0),
            s_TR.stride(0),
            site.module,
            table.num_modules,
            *site.three_sizes,
            ADDS=adds,
            NUM_PARTS=len(site.sizes),
            BM=ROW_TILE,
            **launch.bounds,
            **blocks,
        )


def expand_grad_kernel(
    dx_TD: torch.Tensor, ds_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, adds: bool = True
) -> None:
    for launch in lanes(table.launches, dx_TD.device):
        blocks = expand_grad_blocks(launch.upto, len(site.sizes), dx_TD.device)
        _expand_grad[(cdiv(site.num_in, blocks["BN"]), len(rows.tiles_N4))](
            dx_TD,
            ds_TR,
            table.device_SMF,
            rows.tiles_N4,
            rows.keys_T,
            dx_TD.stride(0),
            ds_TR.stride(0),
            site.module,
            table.num_modules,
            site.num_in,
            ADDS=adds,
            DROPS=table.drops and rows.drops,
            NUM_PARTS=len(site.sizes),
            BM=ROW_TILE,
            **launch.bounds,
            **blocks,
        )


expand = on_device(expand_kernel, expand_reference)
"""Adds every owner's S Bᵀ to its rows of y, or overwrites them with it."""


expand_grad = on_device(expand_grad_kernel, expand_grad_reference)
"""Adds every owner's drop(dS A) to its rows of dx, or overwrites them with it."""
