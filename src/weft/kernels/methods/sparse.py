"""A sparse difference to a weight, and the gradients of its values, for all owners of a microbatch in one launch.

Forward, for the rows of an owner with a difference in some part m of a site, with values v on positions (o, i):
    y[t, o] += Σ v x[t, i]                 over the positions of o
Backward:
    dx[t, i] += Σ v dy[t, o]               over the positions of i, part after part
    dv += Σ dy[t, o] x[t, i]               over the rows of a sample; samples one after another in the job's order
Every sum has a fixed order and is taken in fp32. No cut into microbatches and no neighbour changes a sum; only an
owner's own rows are read.

A position reads one column of x in all rows of a tile, so tiles are transposed first: each is stored from its own
start, filled up with zeros, so that the 64 rows of one column are contiguous. Tiles of other owners are left unwritten.

Shape suffixes: T rows, N numbers of a row, V positions, K tiles, M rows of a tile.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, on_device, runs_triton, tl
from weft.kernels.lora.tables import MORE, ROW_TILE, RowTables, Site, SlotTable
from weft.kernels.lora.tile import line_of, part_bounds, part_of_block
from weft.kernels.methods.parts import NO_OTHERS, SparsePart

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


_OUTPUTS = 32
"""Columns that a program of a product computes at a time."""
_PROGRAMS = 128
"""Programs of a tile, where there is work for so many. Most tiles have another owner, and a program takes time even to
detect that; but fewer would leave an H200 waiting for memory."""


def sparse_parts(slot: int, site: Site, table: SlotTable) -> list[tuple[slice, SparsePart]]:
    """A slot's differences at a site, with the columns of the outputs that they change."""
    parts = table.others.get(slot, NO_OTHERS).sparse
    modules = zip(range(site.module, site.module + len(site.sizes)), site.starts, site.sizes, strict=True)
    return [(slice(start, start + size), parts[m]) for m, start, size in modules if m in parts]


def _dense(part: SparsePart, site: Site, columns: slice) -> torch.Tensor:
    delta = torch.zeros(columns.stop - columns.start, site.num_in, device=part.values_V.device)
    delta[part.outputs_V.long(), part.inputs_V.long()] = part.values_V
    return delta


def sparse_reference(x_TN: torch.Tensor, y_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    for span in rows.spans:
        mine = slice(span.start, span.end)
        for columns, part in sparse_parts(span.slot, site, table):
            added = x_TN[mine].float() @ _dense(part, site, columns).t()
            y_TN[mine, columns] = (y_TN[mine, columns].float() + added).to(y_TN.dtype)


def sparse_input_reference(
    dy_TN: torch.Tensor, dx_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> None:
    for span in rows.spans:
        mine = slice(span.start, span.end)
        for columns, part in sparse_parts(span.slot, site, table):
            added = dy_TN[mine, columns].float() @ _dense(part, site, columns)
            dx_TN[mine] = (dx_TN[mine].float() + added).to(dx_TN.dtype)


@jit
def _gathered(  # type: ignore[no-untyped-def]
    acc, turned, starts, indices, values, outs, inside, BM: tl.constexpr
):
    """acc + Σ value · column, over the positions of each of `outs`, from the first to the last."""
    first = tl.load(starts + outs, mask=inside, other=0)
    last = tl.load(starts + outs + 1, mask=inside, other=0)
    # Four at a time: a column is addressed by its index, so one alone would wait for the memory twice.
    for k in range(0, tl.max(last - first, axis=0), 4):
        index_0, value_0 = _position(indices, values, first + k, last)
        index_1, value_1 = _position(indices, values, first + k + 1, last)
        index_2, value_2 = _position(indices, values, first + k + 2, last)
        index_3, value_3 = _position(indices, values, first + k + 3, last)
        column_0 = _column(turned, index_0, first + k < last, BM)
        column_1 = _column(turned, index_1, first + k + 1 < last, BM)
        column_2 = _column(turned, index_2, first + k + 2 < last, BM)
        column_3 = _column(turned, index_3, first + k + 3 < last, BM)
        acc += column_0 * value_0[None, :]
        acc += column_1 * value_1[None, :]
        acc += column_2 * value_2[None, :]
        acc += column_3 * value_3[None, :]
    return acc


@jit
def _position(indices, values, at, last):  # type: ignore[no-untyped-def]
    """The rows or columns and the values of some positions."""
    return tl.load(indices + at, mask=at < last, other=0), tl.load(values + at, mask=at < last, other=0.0)


@jit
def _column(turned, index, has, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, BM)[:, None]
    return tl.load(turned + index.to(tl.int64)[None, :] * BM + rows, mask=has[None, :], other=0.0).to(tl.float32)


@jit
def _add_rows(y, stride_y, acc, start, end, columns, inside, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = start + tl.arange(0, BM)
    mask = (rows < end)[:, None] & inside[None, :]
    here = y + rows.to(tl.int64)[:, None] * stride_y + columns[None, :]
    tl.store(here, (tl.load(here, mask=mask, other=0.0).to(tl.float32) + acc).to(y.dtype.element_ty), mask=mask)


@jit
def _sparse_product(  # type: ignore[no-untyped-def]
    turned,
    y,
    table,
    tiles,
    stride_y,
    module,
    num_modules,
    width,
    size_0,
    size_1,
    size_2,
    NUM_PARTS: tl.constexpr,
    MORE: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile = tl.program_id(1)
    start, end, slot = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    if (end <= start) | (not is_sparse(table, slot, module, num_modules, NUM_PARTS, MORE)):
        return
    num_blocks = tl.cdiv(size_0, BN) + tl.cdiv(size_1, BN) + tl.cdiv(size_2, BN)
    first = tl.program_id(0) * GROUP
    for number in range(first, tl.minimum(first + GROUP, num_blocks)):
        part, block = part_of_block(number, size_0, size_1, NUM_PARTS, BN)
        begin, size = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
        address = tl.load(line_of(table, slot, module + part, num_modules) + MORE)
        if address != 0:
            about = address.to(tl.pointer_type(tl.int64))
            starts = tl.load(about).to(tl.pointer_type(tl.int32))
            indices = tl.load(about + 1).to(tl.pointer_type(tl.int32))
            values = tl.load(about + 2).to(tl.pointer_type(tl.float32))
            outs = block * BN + tl.arange(0, BN)
            inside = outs < size
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            acc = _gathered(acc, turned + tile.to(tl.int64) * width * BM, starts, indices, values, outs, inside, BM)
            _add_rows(y, stride_y, acc, start, end, begin + outs, inside, BM)


@jit
def _sparse_input(  # type: ignore[no-untyped-def]
    turned,
    dx,
    table,
    tiles,
    stride_x,
    module,
    num_modules,
    width,
    num_features,
    size_0,
    size_1,
    size_2,
    NUM_PARTS: tl.constexpr,
    MORE: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile = tl.program_id(1)
    start, end, slot = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    if (end <= start) | (not is_sparse(table, slot, module, num_modules, NUM_PARTS, MORE)):
        return
    first = tl.program_id(0) * GROUP
    for block in range(first, tl.minimum(first + GROUP, tl.cdiv(num_features, BN))):
        features = block * BN + tl.arange(0, BN)
        inside = features < num_features
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for part in tl.static_range(NUM_PARTS):
            begin, _ = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
            address = tl.load(line_of(table, slot, module + part, num_modules) + MORE)
            if address != 0:
                about = address.to(tl.pointer_type(tl.int64))
                starts = tl.load(about + 3).to(tl.pointer_type(tl.int32))
                indices = tl.load(about + 4).to(tl.pointer_type(tl.int32))
                values = tl.load(about + 5).to(tl.pointer_type(tl.float32))
                here = turned + (tile.to(tl.int64) * width + begin) * BM
                acc = _gathered(acc, here, starts, indices, values, features, inside, BM)
        _add_rows(dx, stride_x, acc, start, end, features, inside, BM)


def sparse_kernel(x_TN: torch.Tensor, y_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    num_blocks = sum(cdiv(size, _OUTPUTS) for size in site.sizes)
    group = max(1, num_blocks // _PROGRAMS)
    _sparse_product[(cdiv(num_blocks, group), len(rows.tiles_N4))](
        turned_kernel(x_TN, site, rows, table),
        y_TN,
        table.device_SMF,
        rows.tiles_N4,
        y_TN.stride(0),
        site.module,
        table.num_modules,
        x_TN.shape[1],
        *site.three_sizes,
        NUM_PARTS=len(site.sizes),
        MORE=MORE,
        GROUP=group,
        BM=ROW_TILE,
        BN=_OUTPUTS,
        num_warps=8 if group > 1 else 4,
    )


def sparse_input_kernel(
    dy_TN: torch.Tensor, dx_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> torch.Tensor:
    """Adds to dx; returns dy, transposed."""
    turned_KNM = turned_kernel(dy_TN, site, rows, table)
    group = max(1, cdiv(site.num_in, _OUTPUTS) // _PROGRAMS)
    _sparse_input[(cdiv(site.num_in, _OUTPUTS * group), len(rows.tiles_N4))](
        turned_KNM,
        dx_TN,
        table.device_SMF,
        rows.tiles_N4,
        dx_TN.stride(0),
        site.module,
        table.num_modules,
        dy_TN.shape[1],
        site.num_in,
        *site.three_sizes,
        NUM_PARTS=len(site.sizes),
        MORE=MORE,
        GROUP=group,
        BM=ROW_TILE,
        BN=_OUTPUTS,
        num_warps=8 if group > 1 else 4,
    )
    return turned_KNM


sparse = on_device(sparse_kernel, sparse_reference)
"""Adds every owner's x Δᵀ to its rows of y."""


def sparse_input(
    dy_TN: torch.Tensor, dx_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> torch.Tensor | None:
    """Adds every owner's dy Δ to its rows of dx; returns dy, transposed, for `sparse_grad`."""
    if runs_triton(dy_TN):
        return sparse_input_kernel(dy_TN, dx_TN, site, rows, table)
    sparse_input_reference(dy_TN, dx_TN, site, rows, table)
    return None


NUM_PROGRAMS = 132 * 32
_POSITIONS = 32
"""Positions of a program at a time; on an H200 64 took a sixth longer."""


def sparse_grad_reference(
    x_TN: torch.Tensor, dy_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> None:
    for slot, spans in rows.by_slot().items():
        for columns, part in sparse_parts(slot, site, table):
            for span in spans:
                mine = slice(span.start, span.end)
                whole = dy_TN[mine, columns].float().t() @ x_TN[mine].float()
                part.grad_V.add_(whole[part.outputs_V.long(), part.inputs_V.long()])


@jit
def _values_grad(  # type: ignore[no-untyped-def]
    turned_x,
    turned_dy,
    table,
    owners,
    owned,
    first_tiles,
    module,
    num_modules,
    width_x,
    width_dy,
    size_0,
    size_1,
    size_2,
    NUM_PARTS: tl.constexpr,
    MORE: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    rows = tl.arange(0, BM)
    for number in range(0, tl.load(owners).to(tl.int32)):
        owner = owners + (1 + number) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        for part in tl.static_range(NUM_PARTS):
            begin, _ = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
            address = tl.load(line_of(table, slot, module + part, num_modules) + MORE)
            if address != 0:
                about = address.to(tl.pointer_type(tl.int64))
                inputs = tl.load(about + 1).to(tl.pointer_type(tl.int32))
                outputs = tl.load(about + 6).to(tl.pointer_type(tl.int32))
                grad = tl.load(about + 7).to(tl.pointer_type(tl.float32))
                positions = tl.load(about + 8).to(tl.int32)
                for block in range(tl.program_id(0), tl.cdiv(positions, BV), tl.num_programs(0)):
                    indices = block * BV + tl.arange(0, BV)
                    inside = indices < positions
                    to_x = tl.load(inputs + indices, mask=inside, other=0).to(tl.int64)[:, None] * BM + rows[None, :]
                    to_dy = tl.load(outputs + indices, mask=inside, other=0).to(tl.int64) + begin
                    to_dy = to_dy[:, None] * BM + rows[None, :]
                    total = tl.load(grad + indices, mask=inside, other=0.0)
                    for span in range(first_span, last_span):
                        length = tl.load(owned + span * 2 + 1) - tl.load(owned + span * 2)
                        first_tile = tl.load(first_tiles + span)
                        acc = tl.zeros((BV,), dtype=tl.float32)
                        for tile in range(first_tile, first_tile + tl.cdiv(length, BM)):
                            base = tl.cast(tile, tl.int64) * BM
                            x = tl.load(turned_x + base * width_x + to_x, mask=inside[:, None], other=0.0)
                            dy = tl.load(turned_dy + base * width_dy + to_dy, mask=inside[:, None], other=0.0)
                            acc += tl.sum(x.to(tl.float32) * dy.to(tl.float32), axis=1)
                        total += acc
                    tl.store(grad + indices, total, mask=inside)


def sparse_grad_kernel(
    x_TN: torch.Tensor,
    dy_TN: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
    turned_KNM: torch.Tensor | None = None,
) -> None:
    _values_grad[(NUM_PROGRAMS,)](
        turned_kernel(x_TN, site, rows, table),
        turned_kernel(dy_TN, site, rows, table) if turned_KNM is None else turned_KNM,
        table.device_SMF,
        rows.owners_J4,
        rows.owned_G2,
        rows.first_tiles_G1,
        site.module,
        table.num_modules,
        x_TN.shape[1],
        dy_TN.shape[1],
        *site.three_sizes,
        NUM_PARTS=len(site.sizes),
        MORE=MORE,
        BM=ROW_TILE,
        BV=_POSITIONS,
    )


def sparse_grad(
    x_TN: torch.Tensor,
    dy_TN: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
    turned_KNM: torch.Tensor | None = None,
) -> None:
    """Adds dyᵀ x on its positions to every owner's gradients; `turned_KNM`: dy, transposed, if it exists."""
    if runs_triton(x_TN):
        sparse_grad_kernel(x_TN, dy_TN, site, rows, table, turned_KNM)
    else:
        sparse_grad_reference(x_TN, dy_TN, site, rows, table)
