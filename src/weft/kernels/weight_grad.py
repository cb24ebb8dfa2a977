"""Gradients of A and B, for all owners of a microbatch in one launch each.

For every owner and each part m of a site:
    dA_m += dS_mᵀ drop_m(x)           (R_m, D), fp32
    dB_m += scale · dy_mᵀ S_m         (O_m, R_m), fp32
Each sample is summed by itself, in blocks of rows counted from its own start, and the samples of an owner are added to
the gradient one after another in the job's order: ((g + s1) + s2) + s3. No microbatch cut, neighbour or place in the
buffer can change that sum. Only an owner's own rows are read: a NaN elsewhere changes nothing.

A fixed number of programs takes work items (owner, rank block, column block) in turn; how many there are is read from
the device, so a captured launch serves any mix of jobs.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, runs_triton, tl
from weft.kernels.tables import RowTables, Site, SlotTable
from weft.kernels.tile import drop_seed, drop_threshold, float_field, is_kept, keep_scale, line_of, pad
from weft.kernels.tuning import REDUCTION, rank_block, weight_grad_blocks

NUM_PROGRAMS = 132 * 4
"""Four for each multiprocessor of an H200, the largest we know; more than that only wait their turn."""


def weight_grad_reference(
    x_TD: torch.Tensor,
    s_TR: torch.Tensor,
    dy_TO: torch.Tensor,
    ds_TR: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
) -> None:
    """Adds to the gradients of every owner."""
    for slot, spans in rows.by_slot().items():
        for start, size, (column, rank, entry) in zip(site.starts, site.sizes, table.columns(slot, site), strict=True):
            for span in spans if entry is not None else ():
                assert entry is not None
                own, columns = slice(span.start, span.end), slice(column, column + rank)
                x_LD = rows.dropped(entry, x_TD[own], own).float()
                entry.grad_a_RD.addmm_(ds_TR[own, columns].float().t(), x_LD)
                dy_LO = dy_TO[own, start : start + size].float()
                entry.grad_b_OR.addmm_(dy_LO.t(), s_TR[own, columns].float(), alpha=entry.scale)


@jit
def _grad_a(  # type: ignore[no-untyped-def]
    x,
    ds,
    table,
    owners,
    owned,
    keys,
    stride_x,
    stride_s,
    module,
    num_modules,
    num_features,
    DROPS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    column_blocks = tl.cdiv(num_features, BN)
    per_owner = NUM_PARTS * RANK_BLOCKS * column_blocks
    num_items = tl.load(owners).to(tl.int32) * per_owner
    ts = tl.arange(0, BT)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = owners + (1 + item // per_owner) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        block = (item % per_owner) // column_blocks
        columns = (item % column_blocks) * BN + tl.arange(0, BN)
        line = line_of(table, slot, module + block // RANK_BLOCKS, num_modules)
        threshold = drop_threshold(line)
        rank = tl.load(line).to(tl.int32)
        column = tl.load(line + 1).to(tl.int32)
        grad = tl.load(line + 4)
        first = (block % RANK_BLOCKS) * BR
        if NUM_PARTS > 1:
            # All parts as one matrix, where nothing is dropped and no rank is padded.
            whole = 0
            grad_whole = grad
            apart = False
            for part in tl.static_range(NUM_PARTS):
                other = line_of(table, slot, module + part, num_modules)
                other_rank = tl.load(other).to(tl.int32)
                grad_whole = tl.where((whole == 0) & (other_rank > 0), tl.load(other + 4), grad_whole)
                whole += other_rank
                apart = apart | (DROPS and drop_threshold(other) > 0) | (other_rank % 8 != 0)
            if not apart:
                rank = whole
                column = 0
                grad = grad_whole
                first = block * BR
        if first < rank:
            column = column // 8 * 8  # says that it is a multiple, which a hint cannot on a value of two origins
            ranks = first + tl.arange(0, BR)
            has = ranks < pad(rank)
            inside = columns < num_features
            seed = drop_seed(line)
            scale = keep_scale(threshold)
            out = tl.multiple_of(grad.to(tl.pointer_type(tl.float32)), 16)
            out = out + ranks.to(tl.int64)[:, None] * num_features + columns[None, :]
            mask = (ranks < rank)[:, None] & inside[None, :]
            total = tl.load(out, mask=mask, other=0.0)
            for span in range(first_span, last_span):
                start, end = tl.load(owned + span * 2), tl.load(owned + span * 2 + 1)
                acc = tl.zeros((BR, BN), dtype=tl.float32)
                for t in range(start, end, BT):
                    rows = t + ts
                    row_mask = rows < end
                    x_tile = tl.load(
                        x + rows.to(tl.int64)[:, None] * stride_x + columns[None, :],
                        mask=row_mask[:, None] & inside[None, :],
                        other=0.0,
                    )
                    if DROPS and threshold > 0:
                        row_keys = tl.load(keys + rows, mask=row_mask, other=0)
                        kept = is_kept(row_keys, columns, seed, threshold)
                        x_tile = tl.where(kept, x_tile.to(tl.float32) * scale, 0.0).to(x.dtype.element_ty)
                    ds_tile = tl.load(
                        ds + rows.to(tl.int64)[None, :] * stride_s + (column + ranks)[:, None],
                        mask=row_mask[None, :] & has[:, None],
                        other=0.0,
                    )
                    acc = tl.dot(ds_tile, x_tile, acc, input_precision="ieee")
                total += acc
            tl.store(out, total, mask=mask)


@jit
def _grad_b(  # type: ignore[no-untyped-def]
    dy,
    s,
    table,
    owners,
    owned,
    stride_y,
    stride_s,
    module,
    num_modules,
    size_0,
    size_1,
    size_2,
    NUM_PARTS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    blocks_0, blocks_1 = tl.cdiv(size_0, BN), tl.cdiv(size_1, BN)
    column_blocks = blocks_0 + blocks_1 + tl.cdiv(size_2, BN)
    per_owner = RANK_BLOCKS * column_blocks
    num_items = tl.load(owners).to(tl.int32) * per_owner
    ts = tl.arange(0, BT)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = owners + (1 + item // per_owner) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        first = ((item % per_owner) // column_blocks) * BR
        block = item % column_blocks
        part = 0
        begin = 0
        size = size_0
        if NUM_PARTS > 1 and block >= blocks_0:
            block -= blocks_0
            part = 1
            begin = size_0
            size = size_1
            if NUM_PARTS > 2 and block >= blocks_1:
                block -= blocks_1
                part = 2
                begin = size_0 + size_1
                size = size_2
        line = line_of(table, slot, module + part, num_modules)
        rank = tl.load(line).to(tl.int32)
        if first < rank:
            column = tl.multiple_of(tl.load(line + 1).to(tl.int32), 8)
            ranks = first + tl.arange(0, BR)
            has = ranks < pad(rank)
            columns = block * BN + tl.arange(0, BN)
            inside = columns < size
            scale = float_field(line, 6)
            out = tl.load(line + 5).to(tl.pointer_type(tl.float32))
            out = out + columns.to(tl.int64)[None, :] * rank + ranks[:, None]
            mask = (ranks < rank)[:, None] & inside[None, :]
            total = tl.load(out, mask=mask, other=0.0)
            for span in range(first_span, last_span):
                start, end = tl.load(owned + span * 2), tl.load(owned + span * 2 + 1)
                acc = tl.zeros((BR, BN), dtype=tl.float32)
                for t in range(start, end, BT):
                    rows = t + ts
                    row_mask = rows < end
                    y_tile = tl.load(
                        dy + rows.to(tl.int64)[:, None] * stride_y + (begin + columns)[None, :],
                        mask=row_mask[:, None] & inside[None, :],
                        other=0.0,
                    )
                    s_tile = tl.load(
                        s + rows.to(tl.int64)[None, :] * stride_s + (column + ranks)[:, None],
                        mask=row_mask[None, :] & has[:, None],
                        other=0.0,
                    )
                    acc = tl.dot(s_tile, y_tile, acc, input_precision="ieee")
                total += acc * scale
            tl.store(out, total, mask=mask)


def weight_grad_kernel(
    x_TD: torch.Tensor,
    s_TR: torch.Tensor,
    dy_TO: torch.Tensor,
    ds_TR: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
) -> None:
    """Adds to the gradients of every owner."""
    block = rank_block(table.rank_class)
    blocks = weight_grad_blocks(block)
    shared = {
        "NUM_PARTS": len(site.sizes),
        "RANK_BLOCKS": cdiv(table.rank_class, block),
        "BT": REDUCTION,
        "BN": blocks.width,
        "BR": block,
        **blocks.launch,
    }
    tables = (table.device_SMF, rows.owners_J4, rows.owned_G2)
    place = (site.module, table.num_modules)
    strides_a, strides_b = (x_TD.stride(0), ds_TR.stride(0)), (dy_TO.stride(0), s_TR.stride(0))
    _grad_a[(NUM_PROGRAMS,)](
        x_TD, ds_TR, *tables, rows.keys_T, *strides_a, *place, site.num_in, DROPS=table.drops, **shared
    )
    _grad_b[(NUM_PROGRAMS,)](dy_TO, s_TR, *tables, *strides_b, *place, *site.three_sizes, **shared)


def weight_grad(
    x_TD: torch.Tensor,
    s_TR: torch.Tensor,
    dy_TO: torch.Tensor,
    ds_TR: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
) -> None:
    """Adds dSᵀ drop(x) to each owner's gradient of A and scale · dyᵀ S to that of B."""
    run = weight_grad_kernel if runs_triton(x_TD) else weight_grad_reference
    run(x_TD, s_TR, dy_TO, ds_TR, site, rows, table)
