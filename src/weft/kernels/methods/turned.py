"""Tiles stored column by column, for owners with a sparse difference at a site.

A position of such a difference reads one column of x in all rows of a tile. Each tile is stored from its own start,
filled up with zeros, so that the 64 rows of one column are contiguous. Tiles of other owners are left unwritten.

Shape suffixes: T rows, N numbers of a row, K tiles, M rows of a tile.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, tl
from weft.kernels.lora.tables import MORE, ROW_TILE, RowTables, Site, SlotTable
from weft.kernels.lora.tile import line_of

_COLUMNS = 256


@jit
def is_sparse(table, slot, module, num_modules, NUM_PARTS: tl.constexpr, MORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """True if a slot has a sparse difference in any part of a site."""
    is_any = False
    for part in tl.static_range(NUM_PARTS):
        is_any = is_any | (tl.load(line_of(table, slot, module + part, num_modules) + MORE) != 0)
    return is_any


@jit
def _turn(  # type: ignore[no-untyped-def]
    x,
    out,
    table,
    tiles,
    stride_x,
    module,
    num_modules,
    width,
    NUM_PARTS: tl.constexpr,
    MORE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile = tl.program_id(1)
    start, end, slot = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    if (end <= start) | (not is_sparse(table, slot, module, num_modules, NUM_PARTS, MORE)):
        return
    rows = tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = columns < width
    value = tl.load(
        x + (start + rows).to(tl.int64)[:, None] * stride_x + columns[None, :],
        mask=(start + rows < end)[:, None] & inside[None, :],
        other=0.0,
    )
    first = out + tile.to(tl.int64) * width * BM
    tl.store(first + columns.to(tl.int64)[:, None] * BM + rows[None, :], tl.trans(value), mask=inside[:, None])


def turned_kernel(x_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> torch.Tensor:
    """The tiles of owners with a difference at the site, column by column (K, N, rows of a tile)."""
    num_tiles, width = len(rows.tiles_N4), x_TN.shape[1]
    out_KNM = x_TN.new_empty(num_tiles, width, ROW_TILE)
    _turn[(cdiv(width, _COLUMNS), num_tiles)](
        x_TN,
        out_KNM,
        table.device_SMF,
        rows.tiles_N4,
        x_TN.stride(0),
        site.module,
        table.num_modules,
        width,
        NUM_PARTS=len(site.sizes),
        MORE=MORE,
        BM=ROW_TILE,
        BN=_COLUMNS,
        num_warps=8,
    )
    return out_KNM
