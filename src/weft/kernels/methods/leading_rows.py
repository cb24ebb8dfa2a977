"""Rows in front of every sample that an adapter fills, for all owners of a microbatch in one launch.

Forward, for every sample of an owner with V such rows at a site:
    x[start + v] = rows[v]                (T, N)
Backward:
    drows[v] += dx[start + v]             (V, N), fp32, sample by sample in the job's order
and with `clears`, dx[start + v] = 0, since the overwritten values have no gradient.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, on_device, runs_triton, tl
from weft.kernels.lora.tables import RowTables, SlotTable
from weft.kernels.lora.tile import line_of
from weft.kernels.methods.parts import NO_OTHERS

NUM_PROGRAMS = 132 * 4
_COLUMNS, _ROWS = 128, 16


def put_rows_reference(x_TN: torch.Tensor, module: int, rows: RowTables, table: SlotTable) -> None:
    for span in rows.spans:
        leading = table.others.get(span.slot, NO_OTHERS).rows.get(module)
        if leading is not None:
            x_TN[span.start : span.start + len(leading.rows_VN)] = leading.rows_VN


def rows_grad_reference(
    dx_TN: torch.Tensor, offset: int, module: int, rows: RowTables, table: SlotTable, clears: bool
) -> None:
    columns = slice(offset, offset + dx_TN.shape[1])
    for slot, spans in rows.by_slot().items():
        leading = table.others.get(slot, NO_OTHERS).rows.get(module)
        for span in spans if leading is not None else ():
            assert leading is not None
            dx_VN = dx_TN[span.start : span.start + len(leading.rows_VN)]
            leading.grad_VN[:, columns].add_(dx_VN.float())
            if clears:
                dx_VN.zero_()


@jit
def _put(  # type: ignore[no-untyped-def]
    x, table, owners, owned, stride_x, module, num_modules, width, BV: tl.constexpr, BN: tl.constexpr
):
    column_blocks = tl.cdiv(width, BN)
    num_items = tl.load(owners).to(tl.int32) * column_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = owners + (1 + item // column_blocks) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        line = line_of(table, slot, module, num_modules)
        number = tl.load(line + 1).to(tl.int32)
        given = tl.load(line + 2).to(tl.pointer_type(x.dtype.element_ty))
        columns = (item % column_blocks) * BN + tl.arange(0, BN)
        for first in range(0, number, BV):
            indices = first + tl.arange(0, BV)
            mask = (indices < number)[:, None] & (columns < width)[None, :]
            value = tl.load(given + indices.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0)
            for span in range(first_span, last_span):
                rows = tl.load(owned + span * 2) + indices
                tl.store(x + rows.to(tl.int64)[:, None] * stride_x + columns[None, :], value, mask=mask)


@jit
def _grad(  # type: ignore[no-untyped-def]
    dx,
    table,
    owners,
    owned,
    stride_x,
    module,
    num_modules,
    width,
    offset,
    whole,
    CLEARS: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
):
    column_blocks = tl.cdiv(width, BN)
    num_items = tl.load(owners).to(tl.int32) * column_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = owners + (1 + item // column_blocks) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        line = line_of(table, slot, module, num_modules)
        number = tl.load(line + 1).to(tl.int32)
        grad = tl.load(line + 4).to(tl.pointer_type(tl.float32))
        columns = (item % column_blocks) * BN + tl.arange(0, BN)
        for first in range(0, number, BV):
            indices = first + tl.arange(0, BV)
            mask = (indices < number)[:, None] & (columns < width)[None, :]
            here = grad + indices.to(tl.int64)[:, None] * whole + (offset + columns)[None, :]
            total = tl.load(here, mask=mask, other=0.0)
            for span in range(first_span, last_span):
                rows = tl.load(owned + span * 2) + indices
                there = dx + rows.to(tl.int64)[:, None] * stride_x + columns[None, :]
                total += tl.load(there, mask=mask, other=0.0).to(tl.float32)
                if CLEARS:
                    tl.store(there, tl.zeros((BV, BN), dtype=dx.dtype.element_ty), mask=mask)
            tl.store(here, total, mask=mask)


def put_rows_kernel(x_TN: torch.Tensor, module: int, rows: RowTables, table: SlotTable) -> None:
    tables = (table.device_SMF, rows.owners_J4, rows.owned_G2)
    where = (module, table.num_modules, x_TN.shape[1])
    programs = min(NUM_PROGRAMS, len(rows.owners_J4) * cdiv(x_TN.shape[1], _COLUMNS))
    _put[(programs,)](x_TN, *tables, x_TN.stride(0), *where, BV=_ROWS, BN=_COLUMNS)


def rows_grad_kernel(
    dx_TN: torch.Tensor, offset: int, whole: int, module: int, rows: RowTables, table: SlotTable, clears: bool
) -> None:
    """Adds to every owner's gradients, whose rows have `whole` numbers."""
    tables = (table.device_SMF, rows.owners_J4, rows.owned_G2)
    where = (module, table.num_modules, dx_TN.shape[1], offset, whole)
    programs = min(NUM_PROGRAMS, len(rows.owners_J4) * cdiv(dx_TN.shape[1], _COLUMNS))
    _grad[(programs,)](dx_TN, *tables, dx_TN.stride(0), *where, CLEARS=clears, BV=_ROWS, BN=_COLUMNS)


put_rows = on_device(put_rows_kernel, put_rows_reference)
"""Writes each owner's rows in front of its samples."""


def rows_grad(
    parts: list[torch.Tensor], module: int, rows: RowTables, table: SlotTable, *, clears: bool = False
) -> None:
    """Adds to each owner's gradients from the parts of dx, which are side by side in its rows."""
    offset, whole = 0, sum(part.shape[1] for part in parts)
    for part in parts:
        if runs_triton(part):
            rows_grad_kernel(part, offset, whole, module, rows, table, clears)
        else:
            rows_grad_reference(part, offset, module, rows, table, clears)
        offset += part.shape[1]
