"""Factors and shifts of columns, and their gradients, for all owners of a microbatch in one launch.

For the rows of an owner with such a change at a site (IA³, DoRA's lengths, trained biases):
    y = factor ⊙ x + shift                 (T, N);    in the backward, dx = factor ⊙ dy
    dfactor += Σ dy ⊙ x,  dshift += Σ dy   (N), fp32
Products are taken in fp32 and rounded once. Rows of others are copied bit by bit, or left alone. Each sample is summed
by itself, in blocks of rows counted from its own start, and the samples of an owner are added one after another in the
job's order, so that no cut into microbatches and no neighbour changes a sum. Only an owner's own rows are read.

Where x has been overwritten by y: Σ dy ⊙ x = (Σ dy ⊙ y - shift ⊙ Σ dy) / factor. Or, of inputs, where dy has been
overwritten by dx: Σ dy ⊙ x = (Σ dx ⊙ x) / factor. A factor of exactly 0 then gets no gradient.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, on_device, runs_triton, tl
from weft.kernels.lora.tables import OUTPUTS, ROW_TILE, RowTables, Site, SlotTable
from weft.kernels.lora.tile import line_of, part_bounds, part_of_block

_WIDE = 128
"""Columns that a program has at a time: with more, registers leave room for few programs, most of which have no work in
their tile. On an H200 256 columns and eight warps took 22 us at q, k and v, these 11."""
_PROGRAMS = 16
"""Programs of a tile, where there is work for so many: a program takes time even if the tile's owner has no change."""


def changed_sizes(site: Site, field: int) -> tuple[int, int, int]:
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
    out_TN = torch.empty_like(x_TN)
    options = {"FACTORS": False, "SHIFTS": False, "ALL_ROWS": False}
    _launch_change(x_TN, out_TN, site, rows, table, field, None, **options)
    return out_TN


change_columns = on_device(change_columns_kernel, change_columns_reference)
"""Writes factor ⊙ x + shift of every owner's rows, and x of all others, into `out_TN`, which may be x itself.
`field`: `OUTPUTS` or `INPUTS` of the site; without `shifts` only factors, as in the backward. `kept_TN` gets the
original rows of owners with a change."""


def owned_copy(x_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, field: int) -> torch.Tensor:
    """A copy of x with only the rows of owners that change something."""
    return owned_copy_kernel(x_TN, site, rows, table, field) if runs_triton(x_TN) else x_TN.clone()


NUM_PROGRAMS = 132 * 16
_COLUMNS, _ROWS = 32, 128


def column_sums_reference(
    dy_TN: torch.Tensor,
    x_TN: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
    field: int,
    divides: bool = False,
) -> None:
    for slot, spans in rows.by_slot().items():
        for start, size, change in table.changes(slot, site, field):
            for span in spans:
                mine = slice(span.start, span.end), slice(start, start + size)
                dy_LN = dy_TN[mine].float()
                if change.grad_factor_N is not None:
                    total_N = (dy_LN * x_TN[mine].float()).sum(dim=0)
                    if divides:
                        assert change.factor_N is not None
                        if change.shift_N is not None:
                            total_N = total_N - change.shift_N * dy_LN.sum(dim=0)
                        total_N = torch.where(change.factor_N == 0, 0.0, total_N / change.factor_N)
                    change.grad_factor_N.add_(total_N)
                if change.grad_shift_N is not None:
                    change.grad_shift_N.add_(dy_LN.sum(dim=0))


@jit
def _sum_of_sample(  # type: ignore[no-untyped-def]
    dy, x, stride_dy, stride_x, start, end, columns, inside, WITH_X: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr
):
    """Σ dy ⊙ x, or Σ dy, of a sample's rows."""
    acc = tl.zeros((BN,), dtype=tl.float32)
    for t in range(start, end, BT):
        rows = t + tl.arange(0, BT)
        mask = (rows < end)[:, None] & inside[None, :]
        here = rows.to(tl.int64)[:, None]
        value = tl.load(dy + here * stride_dy + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if WITH_X:
            value *= tl.load(x + here * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += tl.sum(value, axis=0)
    return acc


@jit
def _sums(  # type: ignore[no-untyped-def]
    dy,
    x,
    table,
    owners,
    owned,
    stride_dy,
    stride_x,
    module,
    num_modules,
    size_0,
    size_1,
    size_2,
    FIELD: tl.constexpr,
    DIVIDES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    column_blocks = tl.cdiv(size_0, BN) + tl.cdiv(size_1, BN) + tl.cdiv(size_2, BN)
    num_items = tl.load(owners).to(tl.int32) * column_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = owners + (1 + item // column_blocks) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        part, block = part_of_block(item % column_blocks, size_0, size_1, NUM_PARTS, BN)
        begin, size = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
        line = line_of(table, slot, module + part, num_modules)
        factor, shift = tl.load(line + FIELD), tl.load(line + FIELD + 1)
        to_factor, to_shift = tl.load(line + FIELD + 2), tl.load(line + FIELD + 3)
        columns = block * BN + tl.arange(0, BN)
        inside = columns < size
        if to_factor != 0:
            here = to_factor.to(tl.pointer_type(tl.float32)) + columns
            total = tl.load(here, mask=inside, other=0.0)
            for span in range(first_span, last_span):
                start, end = tl.load(owned + span * 2), tl.load(owned + span * 2 + 1)
                acc = _sum_of_sample(
                    dy, x, stride_dy, stride_x, start, end, begin + columns, inside, True, BT, BN
                )  # fmt: skip
                if DIVIDES:
                    if shift != 0:
                        acc -= tl.load(
                            shift.to(tl.pointer_type(tl.float32)) + columns, mask=inside, other=0.0
                        ) * _sum_of_sample(
                            dy, x, stride_dy, stride_x, start, end, begin + columns, inside, False, BT, BN
                        )  # fmt: skip
                    by = tl.load(factor.to(tl.pointer_type(tl.float32)) + columns, mask=inside, other=1.0)
                    acc = tl.where(by == 0.0, 0.0, acc / tl.where(by == 0.0, 1.0, by))
                total += acc
            tl.store(here, total, mask=inside)
        if to_shift != 0:
            here = to_shift.to(tl.pointer_type(tl.float32)) + columns
            total = tl.load(here, mask=inside, other=0.0)
            for span in range(first_span, last_span):
                start, end = tl.load(owned + span * 2), tl.load(owned + span * 2 + 1)
                total += _sum_of_sample(
                    dy, x, stride_dy, stride_x, start, end, begin + columns, inside, False, BT, BN
                )  # fmt: skip
            tl.store(here, total, mask=inside)


def column_sums_kernel(
    dy_TN: torch.Tensor,
    x_TN: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
    field: int,
    divides: bool = False,
) -> None:
    sizes = changed_sizes(site, field)
    _sums[(NUM_PROGRAMS,)](
        dy_TN,
        x_TN,
        table.device_SMF,
        rows.owners_J4,
        rows.owned_G2,
        dy_TN.stride(0),
        x_TN.stride(0),
        site.module,
        table.num_modules,
        *sizes,
        FIELD=field,
        DIVIDES=divides,
        NUM_PARTS=sum(size > 0 for size in sizes),
        BT=_ROWS,
        BN=_COLUMNS,
        num_warps=4,
    )


column_sums = on_device(column_sums_kernel, column_sums_reference)
"""Adds to each owner's gradients of factors and shifts; with `divides` one of the two is after the change."""
