"""Factors and shifts of columns, for all owners of a microbatch in one launch.

For the rows of an owner with such a change at a site (IA³, DoRA's lengths, trained biases):
    y = factor ⊙ x + shift                 (T, N);    in the backward, dx = factor ⊙ dy
Products are taken in fp32 and rounded once. Rows of others are copied bit by bit, or left alone. The gradients of
factors and shifts are in `column_sums.py`.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, runs_triton, tl
from weft.kernels.lora.tables import OUTPUTS, ROW_TILE, RowTables, Site, SlotTable
from weft.kernels.lora.tile import line_of, part_bounds, part_of_block

_WIDE = 128
"""Columns that a program has at a time: with more, registers leave room for few programs, most of which have no work in
their tile. On an H200 256 columns and eight warps took 22 us at q, k and v, these 11."""
_PROGRAMS = 16
"""Programs of a tile, where there is work for so many: a program takes time even if the tile's owner has no change."""


def changed_sizes(site: Site, field: int) -> tuple[int, int, int]:
    """The widths of a site's parts, as kernels take them."""
    return site.three_sizes if field == OUTPUTS else (site.num_in, 0, 0)


def change_columns_reference(
    x_TN: torch.Tensor,
    out_TN: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
    field: int,
    shifts: bool = True,
    kept_TN: torch.Tensor | None = None,
) -> None:
    if kept_TN is not None:
        kept_TN.copy_(x_TN)
    if out_TN is not x_TN:
        out_TN.copy_(x_TN)
    for span in rows.spans:
        for start, size, change in table.changes(span.slot, site, field):
            mine = slice(span.start, span.end), slice(start, start + size)
            changed = x_TN[mine].float()
            if change.factor_N is not None:
                changed = changed * change.factor_N
            if shifts and change.shift_N is not None:
                changed = changed + change.shift_N
            out_TN[mine] = changed.to(out_TN.dtype)


@jit
def _change(  # type: ignore[no-untyped-def]
    x,
    out,
    kept,
    table,
    tiles,
    stride_x,
    stride_out,
    stride_kept,
    module,
    num_modules,
    size_0,
    size_1,
    size_2,
    FIELD: tl.constexpr,
    FACTORS: tl.constexpr,
    SHIFTS: tl.constexpr,
    KEEPS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * 4
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if end <= start:
        return
    rows = start + tl.arange(0, BM)
    here = rows.to(tl.int64)[:, None]
    num_blocks = tl.cdiv(size_0, BN) + tl.cdiv(size_1, BN) + tl.cdiv(size_2, BN)
    first = tl.program_id(0) * GROUP
    for number in range(first, tl.minimum(first + GROUP, num_blocks)):
        part, block = part_of_block(number, size_0, size_1, NUM_PARTS, BN)
        begin, size = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
        line = line_of(table, slot, module + part, num_modules)
        factor, shift = tl.load(line + FIELD), tl.load(line + FIELD + 1)
        if ALL_ROWS | (factor != 0) | (shift != 0):
            columns = block * BN + tl.arange(0, BN)
            inside = columns < size
            mask = (rows < end)[:, None] & inside[None, :]
            value = tl.load(x + here * stride_x + (begin + columns)[None, :], mask=mask, other=0.0)
            if KEEPS:
                tl.store(kept + here * stride_kept + (begin + columns)[None, :], value, mask=mask)
            value = value.to(tl.float32)
            if FACTORS:  # noqa: SIM102 (known when it is compiled)
                if factor != 0:
                    factors = tl.load(factor.to(tl.pointer_type(tl.float32)) + columns, mask=inside, other=0.0)
                    value = value * factors[None, :]
            if SHIFTS:  # noqa: SIM102
                if shift != 0:
                    shifts = tl.load(shift.to(tl.pointer_type(tl.float32)) + columns, mask=inside, other=0.0)
                    value = value + shifts[None, :]
            tl.store(out + here * stride_out + (begin + columns)[None, :], value.to(out.dtype.element_ty), mask=mask)


def _launch_change(
    x_TN: torch.Tensor,
    out_TN: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
    field: int,
    kept_TN: torch.Tensor | None,
    **options: bool,
) -> None:
    keeps_TN = x_TN if kept_TN is None else kept_TN
    sizes = changed_sizes(site, field)
    num_blocks = sum(cdiv(size, _WIDE) for size in sizes)
    group = max(1, num_blocks // _PROGRAMS)
    _change[(cdiv(num_blocks, group), len(rows.tiles_N4))](
        x_TN,
        out_TN,
        keeps_TN,
        table.device_SMF,
        rows.tiles_N4,
        x_TN.stride(0),
        out_TN.stride(0),
        keeps_TN.stride(0),
        site.module,
        table.num_modules,
        *sizes,
        FIELD=field,
        KEEPS=kept_TN is not None,
        NUM_PARTS=sum(size > 0 for size in sizes),
        GROUP=group,
        BM=ROW_TILE,
        BN=_WIDE,
        num_warps=4,
        **options,
    )


def change_columns_kernel(
    x_TN: torch.Tensor,
    out_TN: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
    field: int,
    shifts: bool = True,
    kept_TN: torch.Tensor | None = None,
) -> None:
    options = {"FACTORS": True, "SHIFTS": shifts, "ALL_ROWS": out_TN is not x_TN}
    _launch_change(x_TN, out_TN, site, rows, table, field, kept_TN, **options)


def owned_copy_kernel(x_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, field: int) -> torch.Tensor:
    """Copies only the rows of owners."""
    out_TN = torch.empty_like(x_TN)
    options = {"FACTORS": False, "SHIFTS": False, "ALL_ROWS": False}
    _launch_change(x_TN, out_TN, site, rows, table, field, None, **options)
    return out_TN


def change_columns(
    x_TN: torch.Tensor,
    out_TN: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
    field: int,
    shifts: bool = True,
    kept_TN: torch.Tensor | None = None,
) -> None:
    """Writes factor ⊙ x + shift of every owner's rows, and x of all others, into `out_TN`, which may be x itself.

    `field`: `OUTPUTS` or `INPUTS` of the site; without `shifts` only factors, as in the backward. `kept_TN` gets the
    original rows of owners with a change.
    """
    run = change_columns_kernel if runs_triton(x_TN) else change_columns_reference
    run(x_TN, out_TN, site, rows, table, field, shifts, kept_TN)


def owned_copy(x_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, field: int) -> torch.Tensor:
    """A copy of x with only the rows of owners that change something."""
    return owned_copy_kernel(x_TN, site, rows, table, field) if runs_triton(x_TN) else x_TN.clone()
