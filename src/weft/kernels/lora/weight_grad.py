"""Gradients of A and B, for all owners of a microbatch in one launch each.

For every owner and each part m of a site:
    dA_m += dS_mᵀ drop_m(x)           (R_m, D), fp32
    dB_m += scale · dy_mᵀ S_m         (O_m, R_m), fp32
Each sample is summed by itself, in blocks of rows counted from its own start, and the samples of an owner are added to
the gradient one after another in the job's order: ((g + s1) + s2) + s3. No microbatch cut, neighbour or position in the
buffer can change that sum. Columns are the products' long side whatever the ranks, so that all ranks get the same
instructions. An owner with order-independent sums has words instead of gradients, to which its samples are added in
fixed point (`kernels/fixed_point.py`). Only an owner's own rows are read: a NaN elsewhere changes nothing. An adapter
whose A is frozen has no gradient of A: its address is 0, and it is skipped.

A fixed number of programs takes work items (owner, column block) in turn; the number of items is read from the device,
so a captured launch serves any mix of jobs. An item goes over its owner's ranks in blocks, so a narrow adapter costs no
more beside a wide one.
"""

from __future__ import annotations

from itertools import product

import torch

from weft.kernels.fixed_point import Words, add_number, add_small, add_to_words, is_spilling, small_limit
from weft.kernels.launch import jit, lanes, on_device, tl
from weft.kernels.lora.tables import RankLaunch, RowTables, Site, SlotTable
from weft.kernels.lora.tile import (
    drop_seed,
    drop_threshold,
    feature_keys,
    float_field,
    is_kept,
    is_mine,
    keep_scale,
    line_of,
    pad,
    part_bounds,
    part_column,
    part_of_block,
)
from weft.kernels.tuning import REDUCTION, weight_grad_blocks

NUM_PROGRAMS = 132 * 8
"""Eight for each multiprocessor of an H200, the largest GPU supported: items differ in size, and the short ones fill
gaps."""


def weight_grad_reference(
    x_TD: torch.Tensor,
    s_TR: torch.Tensor,
    dy_TO: torch.Tensor,
    ds_TR: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
) -> None:
    for slot, spans in rows.by_slot().items():
        for start, size, (column, rank, entry) in zip(site.starts, site.sizes, table.columns(slot, site), strict=True):
            for span in spans if entry is not None else ():
                assert entry is not None
                mine, columns = slice(span.start, span.end), slice(column, column + rank)
                x_LD = rows.dropped(entry, x_TD[mine], mine).float()
                if entry.grad_a_RD.numel():
                    _add_product(entry.grad_a_RD, entry.words_a, ds_TR[mine, columns].float(), x_LD, 1.0)
                dy_LO = dy_TO[mine, start : start + size].float()
                _add_product(entry.grad_b_OR, entry.words_b, dy_LO, s_TR[mine, columns].float(), entry.scale)


def _add_product(
    grad_MN: torch.Tensor, words: Words | None, left_LM: torch.Tensor, right_LN: torch.Tensor, scale: float
) -> None:
    if words is None:
        grad_MN.addmm_(left_LM.t(), right_LN, alpha=scale)
    else:
        add_to_words(words, left_LM.t().mm(right_LN).mul_(scale))


@jit
def _sample_sum(  # type: ignore[no-untyped-def]
    wide,
    narrow,
    keys,
    stride_wide,
    stride_narrow,
    start,
    end,
    columns,
    offset,
    inside,
    ranks,
    has,
    column_keys,
    threshold,
    DROPPED: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """wideᵀ narrow of one sample, a block of `columns` of wide and `ranks` of narrow."""
    acc = tl.zeros((BN, BR), dtype=tl.float32)
    for t in range(start, end, BT):
        rows = t + tl.arange(0, BT)
        row_mask = rows < end
        wide_tile = tl.load(
            wide + rows.to(tl.int64)[:, None] * stride_wide + (offset + columns)[None, :],
            mask=row_mask[:, None] & inside[None, :],
            other=0.0,
        )
        if DROPPED:
            row_keys = tl.load(keys + rows, mask=row_mask, other=0)
            kept = is_kept(row_keys, column_keys, threshold)
            wide_tile = tl.where(kept, wide_tile, 0.0).to(wide.dtype.element_ty)
        narrow_tile = tl.load(
            narrow + rows.to(tl.int64)[:, None] * stride_narrow + ranks[None, :],
            mask=row_mask[:, None] & has[None, :],
            other=0.0,
        )
        acc = tl.dot(tl.trans(wide_tile), narrow_tile, acc, input_precision="ieee")
    return acc


@jit
def _sum_samples(  # type: ignore[no-untyped-def]
    wide,
    narrow,
    grad,
    words,
    index,
    mask,
    owned,
    keys,
    stride_wide,
    stride_narrow,
    first_span,
    last_span,
    columns,
    offset,
    inside,
    ranks,
    has,
    factor,
    seed,
    threshold,
    DROPPED: tl.constexpr,
    ANY_ORDER: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """Adds factor · wideᵀ narrow of an owner's samples to a block of `columns` of wide and `ranks` of narrow. `words`:
    the addresses of the words of order-independent sums, or 0."""
    column_keys = columns
    if DROPPED:
        column_keys = feature_keys(columns, seed)
    is_any_order = False
    if ANY_ORDER:
        is_any_order = tl.load(words) != 0
    if is_any_order:
        there = tl.load(words).to(tl.pointer_type(tl.int64)) + index
        fine = tl.load(there, mask=mask, other=0)
        is_large = mask & (fine != fine)
        limit = small_limit(last_span - first_span)
        for span in range(first_span, last_span):
            start, end = tl.load(owned + span * 2), tl.load(owned + span * 2 + 1)
            acc = _sample_sum(
                wide, narrow, keys, stride_wide, stride_narrow, start, end, columns, offset, inside, ranks, has,
                column_keys, threshold, DROPPED, BT, BN, BR,
            )  # fmt: skip
            fine, is_large = add_small(fine, is_large, acc * factor, limit)
        if is_spilling(fine, is_large, mask):
            # Seldom: again, number by number in memory, so that the usual way has the registers.
            tl.store(tl.load(words + 2).to(tl.pointer_type(tl.int64)), 1)
            for span in range(first_span, last_span):
                start, end = tl.load(owned + span * 2), tl.load(owned + span * 2 + 1)
                acc = _sample_sum(
                    wide, narrow, keys, stride_wide, stride_narrow, start, end, columns, offset, inside, ranks, has,
                    column_keys, threshold, DROPPED, BT, BN, BR,
                )  # fmt: skip
                beside = tl.load(words + 1).to(tl.pointer_type(tl.int64)) + index
                old, more = tl.load(there, mask=mask, other=0), tl.load(beside, mask=mask, other=0)
                old, more = add_number(old, more, acc * factor)
                tl.store(there, old, mask=mask)
                tl.store(beside, more, mask=mask)
                # What one thread stores another may load.
                tl.debug_barrier()
        else:
            tl.store(there, fine, mask=mask)
    else:
        here = grad + index
        total = tl.load(here, mask=mask, other=0.0)
        for span in range(first_span, last_span):
            start, end = tl.load(owned + span * 2), tl.load(owned + span * 2 + 1)
            acc = _sample_sum(
                wide, narrow, keys, stride_wide, stride_narrow, start, end, columns, offset, inside, ranks, has,
                column_keys, threshold, DROPPED, BT, BN, BR,
            )  # fmt: skip
            total += acc * factor
        tl.store(here, total, mask=mask)


@jit
def _sum_a(  # type: ignore[no-untyped-def]
    x,
    ds,
    out,
    words,
    owned,
    keys,
    stride_x,
    stride_s,
    first_span,
    last_span,
    column,
    first,
    rank,
    columns,
    num_features,
    seed,
    threshold,
    DROPPED: tl.constexpr,
    ANY_ORDER: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """Adds (dSᵀ drop(x))ᵀ of an owner's samples to a block of ranks from `first` on and a block of columns."""
    ranks = first + tl.arange(0, BR)
    inside = columns < num_features
    index = ranks.to(tl.int64)[None, :] * num_features + columns[:, None]
    mask = (ranks < rank)[None, :] & inside[:, None]
    factor = 1.0
    if DROPPED:
        factor = keep_scale(threshold)
    _sum_samples(
        x, ds, out, words, index, mask, owned, keys, stride_x, stride_s, first_span, last_span, columns, 0, inside,
        column + ranks, ranks < pad(rank), factor, seed, threshold, DROPPED, ANY_ORDER, BT, BN, BR,
    )  # fmt: skip


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
    ANY_ORDER: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ABOVE: tl.constexpr,
    UPTO: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    column_blocks = tl.cdiv(num_features, BN)
    num_items = tl.load(owners).to(tl.int32) * column_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = owners + (1 + item // column_blocks) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        if is_mine(table, slot, module, num_modules, ABOVE, UPTO):
            columns = (item % column_blocks) * BN + tl.arange(0, BN)
            whole = 0
            grad_whole = tl.load(line_of(table, slot, module, num_modules) + 4)
            begin = 0
            apart = False
            for part in tl.static_range(NUM_PARTS):
                line = line_of(table, slot, module + part, num_modules)
                rank = tl.load(line).to(tl.int32)
                is_begin = (whole == 0) & (rank > 0)
                grad_whole = tl.where(is_begin, tl.load(line + 4), grad_whole)
                begin = tl.where(is_begin, part, begin)
                whole += rank
                apart = apart | (rank % 8 != 0)
                if DROPS:
                    apart = apart | (drop_threshold(line) > 0)
            if grad_whole != 0:
                if apart:
                    for part in tl.static_range(NUM_PARTS):
                        line = line_of(table, slot, module + part, num_modules)
                        rank = tl.load(line).to(tl.int32)
                        column = part_column(line)
                        out = tl.load(line + 4).to(tl.pointer_type(tl.float32))
                        threshold = drop_threshold(line)
                        for first in range(0, rank, BR):
                            _sum_a(
                                x, ds, out, line + 17, owned, keys, stride_x, stride_s, first_span,
                                last_span, column, first, rank, columns, num_features, drop_seed(line), threshold,
                                DROPS, ANY_ORDER, BT, BN, BR,
                            )  # fmt: skip
                else:
                    # The parts' A and their gradients lie one after another: one matrix, one reading of x.
                    out = tl.multiple_of(grad_whole.to(tl.pointer_type(tl.float32)), 16)
                    words = line_of(table, slot, module + begin, num_modules) + 17
                    for first in range(0, whole, BR):
                        _sum_a(
                            x, ds, out, words, owned, keys, stride_x, stride_s, first_span, last_span, 0, first,
                            whole, columns, num_features, 0, 0, False, ANY_ORDER, BT, BN, BR,
                        )  # fmt: skip


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
    ANY_ORDER: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ABOVE: tl.constexpr,
    UPTO: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    column_blocks = tl.cdiv(size_0, BN) + tl.cdiv(size_1, BN) + tl.cdiv(size_2, BN)
    num_items = tl.load(owners).to(tl.int32) * column_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = owners + (1 + item // column_blocks) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        if is_mine(table, slot, module, num_modules, ABOVE, UPTO):
            part, block = part_of_block(item % column_blocks, size_0, size_1, NUM_PARTS, BN)
            begin, size = part_bounds(part, size_0, size_1, size_2, NUM_PARTS)
            line = line_of(table, slot, module + part, num_modules)
            rank = tl.load(line).to(tl.int32)
            column = part_column(line)
            columns = block * BN + tl.arange(0, BN)
            inside = columns < size
            scale = float_field(line, 6)
            grad = tl.load(line + 5).to(tl.pointer_type(tl.float32))
            for first in range(0, rank, BR):
                ranks = first + tl.arange(0, BR)
                index = columns.to(tl.int64)[:, None] * rank + ranks[None, :]
                mask = (ranks < rank)[None, :] & inside[:, None]
                _sum_samples(
                    dy, s, grad, line + 20, index, mask, owned, owned, stride_y, stride_s, first_span,
                    last_span, columns, begin, inside, column + ranks, ranks < pad(rank), scale, 0, 0, False, ANY_ORDER,
                    BT, BN, BR,
                )  # fmt: skip


def weight_grad_kernel(
    x_TD: torch.Tensor,
    s_TR: torch.Tensor,
    dy_TO: torch.Tensor,
    ds_TR: torch.Tensor,
    site: Site,
    rows: RowTables,
    table: SlotTable,
) -> None:
    num_parts = len(site.sizes)
    tables = (table.device_SMF, rows.owners_J4, rows.owned_G2)
    where = (site.module, table.num_modules)
    strides_a, strides_b = (x_TD.stride(0), ds_TR.stride(0)), (dy_TO.stride(0), s_TR.stride(0))
    shared = {"NUM_PARTS": num_parts, "BT": REDUCTION, "ANY_ORDER": table.has_any_order}

    def add_a(launch: RankLaunch) -> None:
        # The A of all parts have one x, which is read once; the B have separate outputs.
        options = {**shared, **launch.bounds, **weight_grad_blocks(launch.upto, num_parts, x_TD)}
        drops = table.drops and rows.drops
        _grad_a[(NUM_PROGRAMS,)](
            x_TD, ds_TR, *tables, rows.keys_T, *strides_a, *where, site.num_in, DROPS=drops, **options
        )

    def add_b(launch: RankLaunch) -> None:
        options = {**shared, **launch.bounds, **weight_grad_blocks(launch.upto, 1, x_TD)}
        _grad_b[(NUM_PROGRAMS,)](dy_TO, s_TR, *tables, *strides_b, *where, *site.three_sizes, **options)

    for launch, add in lanes(list(product(table.launches, (add_a, add_b))), x_TD.device):
        add(launch)


weight_grad = on_device(weight_grad_kernel, weight_grad_reference)
"""Adds dSᵀ drop(x) to each owner's gradient of A and scale · dyᵀ S to that of B."""
