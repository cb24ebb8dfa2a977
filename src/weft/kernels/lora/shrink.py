"""From activations to rank space, for all owners of a microbatch in one launch.

Forward, for the rows of one owner and each part m of a site:
    S_m  = drop_m(x) A_mᵀ          (T, R_m), x (T, D), A_m (R_m, D)
Backward, with dy the gradient of the site's outputs and B_m holding scale · B:
    dS_m = dy_m B_m                (T, R_m), dy_m (T, O_m), B_m (O_m, R_m)
S holds the parts side by side, each in a multiple of 8 columns, padded by zeros; what lies beyond an owner's columns is
undefined.
Each number is one dot product over D or O, summed in fp32 in blocks from the first to the last. A tile has one owner:
a NaN in another row or slot changes nothing.

Without dropout the parts' A are read as one matrix (they lie one after another), so x is read once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.kernels.launch import jit, lanes, on_device, tl
from weft.kernels.lora.tables import RowTables, Site, SlotTable, padded
from weft.kernels.lora.tile import (
    drop_seed,
    drop_threshold,
    feature_keys,
    is_kept,
    is_mine,
    keep_scale,
    line_of,
    pad,
    part_bounds,
)
from weft.kernels.tuning import REDUCTION, shrink_blocks, shrink_grad_blocks


def shrink_reference(x_TD: torch.Tensor, s_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    for span in rows.spans:
        mine = slice(span.start, span.end)
        for column, rank, entry in table.columns(span.slot, site):
            if entry is not None:
                x_LD = rows.dropped(entry, x_TD[mine], mine)
                s_TR[mine, column : column + padded(rank)] = x_LD @ entry.a_PD.t()


def shrink_grad_reference(
    dy_TO: torch.Tensor, ds_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> None:
    for span in rows.spans:
        mine = slice(span.start, span.end)
        for start, size, (column, rank, entry) in zip(
            site.starts, site.sizes, table.columns(span.slot, site), strict=True
        ):
            if entry is not None:
                dy_LO = dy_TO[mine, start : start + size]
                ds_TR[mine, column : column + padded(rank)] = dy_LO @ entry.b_OP


@jit
def _shrink(  # type: ignore[no-untyped-def]
    x,
    s,
    table,
    tiles,
    keys,
    stride_x,
    stride_s,
    module,
    num_modules,
    num_features,
    NUM_PARTS: tl.constexpr,
    ABOVE: tl.constexpr,
    UPTO: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    DROPS: tl.constexpr,
    PIECES: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    tile = tiles + tl.program_id(0) // PIECES * 4
    start, end, slot = tl.load(tile) + tl.program_id(0) % PIECES * BM, tl.load(tile + 1), tl.load(tile + 2)
    if end <= start:
        return
    if not is_mine(table, slot, module, num_modules, ABOVE, UPTO):
        return
    block = tl.program_id(1)
    line = line_of(table, slot, module + block // RANK_BLOCKS, num_modules)
    threshold = drop_threshold(line)
    rank = pad(tl.load(line).to(tl.int32))
    column = tl.load(line + 1).to(tl.int32)
    a = tl.load(line + 2)
    first = (block % RANK_BLOCKS) * BR
    # Dropout is a slot's: with it each program has one part's block, without it one block of all parts together.
    dropped = threshold > 0
    if NUM_PARTS > 1:
        whole = 0
        a_whole = a
        any_dropped = False
        for part in tl.static_range(NUM_PARTS):
            other = line_of(table, slot, module + part, num_modules)
            other_rank = pad(tl.load(other).to(tl.int32))
            a_whole = tl.where((whole == 0) & (other_rank > 0), tl.load(other + 2), a_whole)
            whole += other_rank
            any_dropped = any_dropped | (drop_threshold(other) > 0)
        if not (DROPS and any_dropped):
            rank = whole
            column = 0
            a = a_whole
            first = block * BR
    if first >= rank:
        return
    column = column // 8 * 8  # shows that it is a multiple, which a hint cannot on a value of two origins
    a_ptr = tl.multiple_of(a.to(tl.pointer_type(x.dtype.element_ty)), 16)
    rows = start + tl.arange(0, BM)
    row_mask = rows < end
    ranks = first + tl.arange(0, BR)
    has = ranks < rank
    ks = tl.arange(0, BK)
    x_rows = x + rows.to(tl.int64)[:, None] * stride_x
    a_rows = a_ptr + ranks.to(tl.int64)[None, :] * num_features
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    if DROPS and dropped:
        row_keys = tl.load(keys + rows, mask=row_mask, other=0)
        seed = drop_seed(line)
        for k in range(0, num_features, BK):
            inside = k + ks < num_features
            x_tile = tl.load(x_rows + (k + ks)[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
            kept = is_kept(row_keys, feature_keys(k + ks, seed), threshold)
            x_tile = tl.where(kept, x_tile, 0.0).to(x.dtype.element_ty)
            a_tile = tl.load(a_rows + (k + ks)[:, None], mask=inside[:, None] & has[None, :], other=0.0)
            acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
        acc *= keep_scale(threshold)
    else:
        for k in range(0, num_features, BK):
            inside = k + ks < num_features
            x_tile = tl.load(x_rows + (k + ks)[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
            a_tile = tl.load(a_rows + (k + ks)[:, None], mask=inside[:, None] & has[None, :], other=0.0)
            acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
    out = s + rows.to(tl.int64)[:, None] * stride_s + (column + ranks)[None, :]
    tl.store(out, acc.to(s.dtype.element_ty), mask=row_mask[:, None] & has[None, :])


@jit
def _shrink_grad(  # type: ignore[no-untyped-def]
    dy,
    ds,
    table,
    tiles,
    stride_y,
    stride_s,
    module,
    num_modules,
    size_0,
    size_1,
    size_2,
    NUM_PARTS: tl.constexpr,
    ABOVE: tl.constexpr,
    UPTO: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    PIECES: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    tile = tiles + tl.program_id(0) // PIECES * 4
    start, end, slot = tl.load(tile) + tl.program_id(0) % PIECES * BM, tl.load(tile + 1), tl.load(tile + 2)
    if not is_mine(table, slot, module, num_modules, ABOVE, UPTO):
        return
    part = tl.program_id(1) // RANK_BLOCKS
    first = (tl.program_id(1) % RANK_BLOCKS) * BR
    line = line_of(table, slot, module + part, num_modules)
    width = pad(tl.load(line).to(tl.int32))
    if (first >= width) | (end <= start):
        return
    column = tl.multiple_of(tl.load(line + 1).to(tl.int32), 8)
    b = tl.multiple_of(tl.load(line + 3).to(tl.pointer_type(dy.dtype.element_ty)), 16)
    begin, size = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
    rows = start + tl.arange(0, BM)
    row_mask = rows < end
    ranks = first + tl.arange(0, BR)
    has = ranks < width
    ks = tl.arange(0, BK)
    y_rows = dy + rows.to(tl.int64)[:, None] * stride_y + begin
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    for k in range(0, size, BK):
        inside = k + ks < size
        y_tile = tl.load(y_rows + (k + ks)[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
        b_tile = tl.load(
            b + (k + ks).to(tl.int64)[:, None] * width + ranks[None, :], mask=inside[:, None] & has[None, :], other=0.0
        )
        acc = tl.dot(y_tile, b_tile, acc, input_precision="ieee")
    out = ds + rows.to(tl.int64)[:, None] * stride_s + (column + ranks)[None, :]
    tl.store(out, acc.to(ds.dtype.element_ty), mask=row_mask[:, None] & has[None, :])


def shrink_kernel(x_TD: torch.Tensor, s_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    for launch in lanes(table.launches, x_TD.device):
        blocks = shrink_blocks(launch.upto, len(site.sizes), x_TD)
        launch_shrink(x_TD, s_TR, site, rows, table, {"BK": REDUCTION, **launch.bounds, **blocks})


def launch_shrink(
    x_TD: torch.Tensor, s_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, launch: Mapping[str, int]
) -> None:
    """Launches it for the ranks and with the blocks of `launch`."""
    num_parts = len(site.sizes)
    _shrink[(len(rows.tiles_N4) * launch["PIECES"], num_parts * launch["RANK_BLOCKS"])](
        x_TD,
        s_TR,
        table.device_SMF,
        rows.tiles_N4,
        rows.keys_T,
        x_TD.stride(0),
        s_TR.stride(0),
        site.module,
        table.num_modules,
        site.num_in,
        NUM_PARTS=num_parts,
        DROPS=table.drops and rows.drops,
        **launch,
    )


def shrink_grad_kernel(dy_TO: torch.Tensor, ds_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    num_parts = len(site.sizes)
    for launch in lanes(table.launches, dy_TO.device):
        blocks = shrink_grad_blocks(launch.upto, dy_TO)
        _shrink_grad[(len(rows.tiles_N4) * blocks["PIECES"], num_parts * blocks["RANK_BLOCKS"])](
            dy_TO,
            ds_TR,
            table.device_SMF,
            rows.tiles_N4,
            dy_TO.stride(0),
            ds_TR.stride(0),
            site.module,
            table.num_modules,
            *site.three_sizes,
            NUM_PARTS=num_parts,
            BK=REDUCTION,
            **launch.bounds,
            **blocks,
        )


shrink = on_device(shrink_kernel, shrink_reference)
"""Writes S = drop(x) Aᵀ of every owned row into `s_TR`."""


shrink_grad = on_device(shrink_grad_kernel, shrink_grad_reference)
"""Writes dS = scale · dy B of every owned row into `ds_TR`."""
