"""A sparse difference to a weight, for all owners of a microbatch in one launch.

Forward, for the rows of an owner that has one in some part m of a site, with values v on positions (o, i):
    y[t, o] += Σ v x[t, i]                 over the positions of o
Backward:
    dx[t, i] += Σ v dy[t, o]               over the positions of i, part after part
Every sum has a fixed order and is taken in fp32; only an owner's own rows are read. The gradients of the values are in
`sparse_grad.py`. A position asks for one column of x in all rows of a tile: tiles are turned first (`turned.py`).

Shape suffixes: T rows, N numbers of a row, V positions.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, runs_triton, tl
from weft.kernels.lora.tables import MORE, ROW_TILE, RowTables, Site, SlotTable
from weft.kernels.lora.tile import line_of, part_bounds, part_of_block
from weft.kernels.methods.parts import NO_OTHERS, SparsePart
from weft.kernels.methods.turned import is_sparse, turned_kernel

_OUTPUTS = 32
"""Columns that a program of a product makes at a time."""
_PROGRAMS = 128
"""Of a tile, where there is work for so many. Most tiles are somebody else's, and a program takes its time even to find
that out; but fewer would leave an H200 waiting for memory."""


def sparse_parts(slot: int, site: Site, table: SlotTable) -> list[tuple[slice, SparsePart]]:
    """A slot's differences at a site, with the columns of the outputs that they change."""
    found = table.others.get(slot, NO_OTHERS).sparse
    places = zip(range(site.module, site.module + len(site.sizes)), site.starts, site.sizes, strict=True)
    return [(slice(start, start + size), found[m]) for m, start, size in places if m in found]


def _dense(part: SparsePart, site: Site, columns: slice) -> torch.Tensor:
    delta = torch.zeros(columns.stop - columns.start, site.num_in, device=part.values_V.device)
    delta[part.outputs_V.long(), part.inputs_V.long()] = part.values_V
    return delta


def sparse_reference(x_TN: torch.Tensor, y_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    """Adds to y."""
    for span in rows.spans:
        own = slice(span.start, span.end)
        for columns, part in sparse_parts(span.slot, site, table):
            added = x_TN[own].float() @ _dense(part, site, columns).t()
            y_TN[own, columns] = (y_TN[own, columns].float() + added).to(y_TN.dtype)


def sparse_input_reference(
    dy_TN: torch.Tensor, dx_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> None:
    """Adds to dx."""
    for span in rows.spans:
        own = slice(span.start, span.end)
        for columns, part in sparse_parts(span.slot, site, table):
            added = dy_TN[own, columns].float() @ _dense(part, site, columns)
            dx_TN[own] = (dx_TN[own].float() + added).to(dx_TN.dtype)


@jit
def _gathered(  # type: ignore[no-untyped-def]
    acc, turned, starts, places, values, outs, inside, BM: tl.constexpr
):
    """acc + Σ value · column, over the positions of each of `outs`, from the first to the last."""
    first = tl.load(starts + outs, mask=inside, other=0)
    last = tl.load(starts + outs + 1, mask=inside, other=0)
    # Four at a time: a column is found through its place, so one alone would wait for the memory twice.
    for k in range(0, tl.max(last - first, axis=0), 4):
        place_0, value_0 = _position(places, values, first + k, last)
        place_1, value_1 = _position(places, values, first + k + 1, last)
        place_2, value_2 = _position(places, values, first + k + 2, last)
        place_3, value_3 = _position(places, values, first + k + 3, last)
        column_0 = _column(turned, place_0, first + k < last, BM)
        column_1 = _column(turned, place_1, first + k + 1 < last, BM)
        column_2 = _column(turned, place_2, first + k + 2 < last, BM)
        column_3 = _column(turned, place_3, first + k + 3 < last, BM)
        acc += column_0 * value_0[None, :]
        acc += column_1 * value_1[None, :]
        acc += column_2 * value_2[None, :]
        acc += column_3 * value_3[None, :]
    return acc


@jit
def _position(places, values, at, last):  # type: ignore[no-untyped-def]
    """The places and values of some positions."""
    return tl.load(places + at, mask=at < last, other=0), tl.load(values + at, mask=at < last, other=0.0)


@jit
def _column(turned, place, has, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of a tile, side by side."""
    rows = tl.arange(0, BM)[:, None]
    return tl.load(turned + place.to(tl.int64)[None, :] * BM + rows, mask=has[None, :], other=0.0).to(tl.float32)


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
        found = tl.load(line_of(table, slot, module + part, num_modules) + MORE)
        if found != 0:
            about = found.to(tl.pointer_type(tl.int64))
            starts = tl.load(about).to(tl.pointer_type(tl.int32))
            places = tl.load(about + 1).to(tl.pointer_type(tl.int32))
            values = tl.load(about + 2).to(tl.pointer_type(tl.float32))
            outs = block * BN + tl.arange(0, BN)
            inside = outs < size
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            acc = _gathered(acc, turned + tile.to(tl.int64) * width * BM, starts, places, values, outs, inside, BM)
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
            found = tl.load(line_of(table, slot, module + part, num_modules) + MORE)
            if found != 0:
                about = found.to(tl.pointer_type(tl.int64))
                starts = tl.load(about + 3).to(tl.pointer_type(tl.int32))
                places = tl.load(about + 4).to(tl.pointer_type(tl.int32))
                values = tl.load(about + 5).to(tl.pointer_type(tl.float32))
                here = turned + (tile.to(tl.int64) * width + begin) * BM
                acc = _gathered(acc, here, starts, places, values, features, inside, BM)
        _add_rows(dx, stride_x, acc, start, end, features, inside, BM)


def sparse_kernel(x_TN: torch.Tensor, y_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    """Adds to y."""
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
    """Adds to dx; returns dy, turned."""
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


def sparse(x_TN: torch.Tensor, y_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    """Adds every owner's x Δᵀ to its rows of y."""
    (sparse_kernel if runs_triton(x_TN) else sparse_reference)(x_TN, y_TN, site, rows, table)


def sparse_input(
    dy_TN: torch.Tensor, dx_TN: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> torch.Tensor | None:
    """Adds every owner's dy Δ to its rows of dx; returns what `sparse_grad` takes as well: dy, turned."""
    if runs_triton(dy_TN):
        return sparse_input_kernel(dy_TN, dx_TN, site, rows, table)
    sparse_input_reference(dy_TN, dx_TN, site, rows, table)
    return None
