"""Gradients of the values of sparse differences, for all owners of a microbatch in one launch.

For an owner with values on positions (o, i) in some part of a site:
    dv += Σ dy[t, o] x[t, i]               over the rows of a sample; samples one after another in the job's order
in fp32. No cut into microbatches and no neighbour changes a sum; only an owner's own rows are read.

Shape suffixes: T rows, N numbers of a row, V positions.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import jit, runs_triton, tl
from weft.kernels.lora.tables import MORE, ROW_TILE, RowTables, Site, SlotTable
from weft.kernels.lora.tile import line_of, part_bounds
from weft.kernels.methods.sparse import sparse_parts
from weft.kernels.methods.turned import turned_kernel

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
