"""A linear of a decoding step, with its adapters, on Hopper: so few rows that the GPU waits for weights.

    Z = x Wᵀ, fp32     beside     S_m = x A_mᵀ,  P_m = S_m B_mᵀ, fp32, for every owner and part m
    y = Z + P, rounded once

Training adds the adapters' part at the end of each block of the product (`kernels/lora/product.py`), run by run. Here
many owners share a block, and each would wait for the one before. So the sums are written as they are, and the
adapters' part is computed meanwhile, in tiles of one owner; one launch takes adapters of all ranks. The operations on
a row are training's, in training's order, and so are its bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.kernels.launch import cdiv, jit, lanes, tl
from weft.kernels.lora.product import (
    BLOCKS,
    NARROW,
    STEP_BYTES,
    WIDE,
    Factors,
    blocks_of,
    multiprocessors,
    scaled,
    sum_block,
)
from weft.kernels.lora.runs import out_ranks
from weft.kernels.lora.shrink import launch_shrink
from weft.kernels.lora.tables import ROW_BLOCK, ROW_TILE, RankLaunch, RowTables, Site, SlotTable
from weft.kernels.lora.tile import line_of, part_bounds, part_column, part_of_block, part_width, weight_b

SUMS: Mapping[int, Mapping[int, Mapping[str, int]]] = {
    64: {
        128: {"BK": 1, "num_warps": 4, "num_stages": 6},
        64: {"BK": 2, "num_warps": 4, "num_stages": 4},
        32: {"BK": 2, "num_warps": 4, "num_stages": 6},
    },
    128: {
        256: {"BK": 1, "num_warps": 8, "num_stages": 4},
        128: {"BK": 1, "num_warps": 8, "num_stages": 4},
        64: {"BK": 2, "num_warps": 8, "num_stages": 4},
        32: {"BK": 2, "num_warps": 8, "num_stages": 4},
    },
}
"""Launches of the sums, by the rows and columns of a block; BK in steps of STEP_BYTES. The tensor cores add along a sum
in order whatever the block is, so its size changes no bit. They leave a multiprocessor room for
the adapters' part."""
SHRINK = {"BM": 16, "BK": 256, "BR": 16, "num_warps": 4, "num_stages": 6}
PARTS = {"BM": 16, "BN": 128, "num_warps": 4, "enable_fp_fusion": False}


@jit
def _sums(  # type: ignore[no-untyped-def]
    x,
    w,
    z,
    row_scale,
    column_scale,
    num_rows,
    num_in,
    num_out,
    SCALED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    row_blocks = tl.cdiv(num_rows, BM)
    for tile in range(tl.program_id(0), row_blocks * tl.cdiv(num_out, BN), tl.num_programs(0)):
        row, column = tile % row_blocks * BM, tile // row_blocks * BN
        rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
        row_scales = rows
        if SCALED:
            row_scales = tl.load(row_scale + rows, mask=rows < num_rows, other=0.0)
        acc = sum_block(x, w, row, column, num_in, True, BM, BN, BK)
        acc = scaled(acc, row_scales, column_scale, columns, num_out, SCALED, SCALED)
        offsets = rows.to(tl.int64)[:, None] * num_out + columns[None, :]
        tl.store(z + offsets, acc, mask=(rows < num_rows)[:, None] & (columns < num_out)[None, :])


@jit
def _parts(  # type: ignore[no-untyped-def]
    p,
    s,
    table,
    tiles,
    stride_s,
    module,
    num_modules,
    size_0,
    size_1,
    size_2,
    NUM_PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    tile = tiles + tl.program_id(1) // PIECES * 4
    start, end, slot = tl.load(tile) + tl.program_id(1) % PIECES * BM, tl.load(tile + 1), tl.load(tile + 2)
    if end <= start:
        return
    part, block = part_of_block(tl.program_id(0), size_0, size_1, NUM_PARTS, BN)
    begin, size = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
    line = line_of(table, slot, module + part, num_modules)
    owner = start, end, part_width(line), part_column(line), weight_b(line, s.dtype.element_ty)
    rows, columns = start + tl.arange(0, BM), block * BN + tl.arange(0, BN)
    mine, inside = rows < end, columns < size
    offsets = rows.to(tl.int64)[:, None] * (size_0 + size_1 + size_2) + (begin + columns)[None, :]
    # Changes no sum that it is added to, whatever the sum's sign.
    own = tl.full((BM, BN), -0.0, dtype=tl.float32)
    if owner[2] > 0:
        own = out_ranks(own, s, stride_s, owner, rows, mine, columns, inside, NARROW, WIDE)
    tl.store(p + offsets, own, mask=mine[:, None] & inside[None, :])


def step_product_kernel(
    x_TD: torch.Tensor, factors: Factors, site: Site, rows: RowTables, table: SlotTable
) -> torch.Tensor:
    """X Wᵀ + S Bᵀ, (T, O), in the type of X."""
    z_TO = x_TD.new_empty(len(x_TD), site.num_out, dtype=torch.float32)
    s_TR = x_TD.new_empty(len(x_TD), len(site.sizes) * table.rank_class)
    p_TO = torch.empty_like(z_TO)
    for is_frozen in lanes((True, False), x_TD.device):
        if is_frozen:
            _launch_sums(factors, z_TO)
        else:
            launch_shrink(x_TD, s_TR, site, rows, table, _shrink_launch(table.rank_class))
            _launch_parts(s_TR, p_TO, site, rows, table)
    return torch.add(z_TO, p_TO, out=torch.empty_like(z_TO, dtype=x_TD.dtype))


def _launch_parts(s_TR: torch.Tensor, p_TO: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    pieces = ROW_TILE // PARTS["BM"]
    _parts[(sum(cdiv(size, PARTS["BN"]) for size in site.sizes), len(rows.tiles_N4) * pieces)](
        p_TO,
        s_TR,
        table.device_SMF,
        rows.tiles_N4,
        s_TR.stride(0),
        site.module,
        table.num_modules,
        *site.three_sizes,
        NUM_PARTS=len(site.sizes),
        PIECES=pieces,
        NARROW=NARROW,
        WIDE=WIDE,
        **PARTS,
    )


def _launch_sums(factors: Factors, z_TO: torch.Tensor) -> None:
    num_rows, num_out = z_TO.shape
    launch = _blocks(num_rows, num_out, factors.x_TK)
    num_tiles = cdiv(num_rows, launch["BM"]) * cdiv(num_out, launch["BN"])
    _sums[(min(multiprocessors(z_TO.device), num_tiles),)](
        blocks_of(factors.x_TK, launch["BM"], launch["BK"]),
        blocks_of(factors.w_NK, launch["BN"], launch["BK"]),
        z_TO,
        z_TO if factors.scale_T is None else factors.scale_T,
        z_TO if factors.scale_N is None else factors.scale_N,
        num_rows,
        factors.x_TK.shape[1],
        num_out,
        SCALED=factors.scale_T is not None,
        **launch,
    )


def _shrink_launch(rank_class: int) -> dict[str, int]:
    rank_blocks, pieces = cdiv(rank_class, SHRINK["BR"]), ROW_TILE // SHRINK["BM"]
    return {**SHRINK, **RankLaunch(-1, rank_class).bounds, "RANK_BLOCKS": rank_blocks, "PIECES": pieces}


def _blocks(num_rows: int, num_columns: int, like: torch.Tensor) -> dict[str, Any]:
    """As wide as leaves a block for most multiprocessors."""
    height = 64 if num_rows <= 64 else ROW_BLOCK
    enough = multiprocessors(like.device) * 2 // 3
    widths = list(SUMS[height])
    width = next((n for n in widths if cdiv(num_rows, height) * cdiv(num_columns, n) >= enough), widths[-1])
    chosen = SUMS[height][width]
    return {**BLOCKS, **chosen, "BM": height, "BN": width, "BK": STEP_BYTES // like.element_size() * chosen["BK"]}
