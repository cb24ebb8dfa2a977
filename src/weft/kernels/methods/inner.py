"""The non-linearity of bottlenecks, in rank space, for all owners of a microbatch in one launch.

Forward, for the rows of an owner with a bottleneck at a site:
    a = S + bias,   s = f(a)             (T, W)
Backward, da overwriting ds:
    da = ds ⊙ f'(a),   dbias += Σ da     (W), fp32
Sums over rows go sample by sample in the job's order, in blocks counted from a sample's own start. Rows of slots
without a non-linearity are left alone.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import jit, on_device, runs_triton, tl
from weft.kernels.lora.tables import INPUTS, MORE, ROW_TILE, RowTables, Site, SlotTable
from weft.kernels.lora.tile import line_of, part_width
from weft.kernels.methods.parts import NO_OTHERS

NUM_PROGRAMS = 132
_BIAS, _GRAD_BIAS = INPUTS + 1, INPUTS + 3
_ROWS, _COLUMNS = 128, 16
"""Rows and columns that a program of `_bias_sums` reads at a time: a program has all rows of an owner, so few columns
finish sooner."""


def activate_reference(s_TR: torch.Tensor, out_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    """Replaces S by a, and writes f(a)."""
    for span in rows.spans:
        inner = table.others.get(span.slot, NO_OTHERS).inner.get(site.module)
        if inner is not None:
            mine = slice(span.start, span.end), slice(0, len(inner.bias_W))
            s_TR[mine] = (s_TR[mine].float() + inner.bias_W).to(s_TR.dtype)
            out_TR[mine] = inner.activation.apply(s_TR[mine].float()).to(out_TR.dtype)


def activate_grad_reference(
    ds_TR: torch.Tensor, a_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> None:
    """Replaces ds by da."""
    for span in rows.spans:
        inner = table.others.get(span.slot, NO_OTHERS).inner.get(site.module)
        if inner is not None:
            mine = slice(span.start, span.end), slice(0, len(inner.bias_W))
            ds_TR[mine] = (ds_TR[mine].float() * inner.activation.derivative(a_TR[mine].float())).to(ds_TR.dtype)


def bias_sums_reference(da_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    for slot, spans in rows.by_slot().items():
        inner = table.others.get(slot, NO_OTHERS).inner.get(site.module)
        for span in spans if inner is not None else ():
            assert inner is not None
            inner.grad_bias_W.add_(da_TR[span.start : span.end, : len(inner.bias_W)].float().sum(dim=0))


@jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _apply(x, number):  # type: ignore[no-untyped-def]
    """f: relu 1, gelu 2, silu 3, tanh 4."""
    result = tl.maximum(x, 0.0)
    if number == 2:
        result = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    if number == 3:
        result = x * _sigmoid(x)
    if number == 4:
        result = 2.0 * _sigmoid(2.0 * x) - 1.0
    return result


@jit
def _derivative(x, number):  # type: ignore[no-untyped-def]
    """f'."""
    result = tl.where(x > 0, 1.0, 0.0)
    if number == 2:
        density = tl.exp(x * x * -0.5) * 0.3989422804014327
        result = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    if number == 3:
        share = _sigmoid(x)
        result = share * (1.0 + x * (1.0 - share))
    if number == 4:
        y = 2.0 * _sigmoid(2.0 * x) - 1.0
        result = 1.0 - y * y
    return result


@jit
def _activate(  # type: ignore[no-untyped-def]
    s,
    out,
    table,
    tiles,
    stride_s,
    stride_out,
    module,
    num_modules,
    BACK: tl.constexpr,
    MORE: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
):
    """Forward: S becomes a, out f(a). Back: out holds a, and S, which is ds, becomes da."""
    tile = tiles + tl.program_id(0) * 4
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    line = line_of(table, slot, module, num_modules)
    number = tl.load(line + MORE)
    first = tl.program_id(1) * BR
    width = part_width(line)
    if (number == 0) | (end <= start) | (first >= width):
        return
    rows = start + tl.arange(0, BM)
    columns = first + tl.arange(0, BR)
    inside = columns < tl.load(line).to(tl.int32)
    mask = (rows < end)[:, None] & inside[None, :]
    here = s + rows.to(tl.int64)[:, None] * stride_s + columns[None, :]
    there = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    value = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        a = tl.load(there, mask=mask, other=0.0).to(tl.float32)
        tl.store(here, (value * _derivative(a, number)).to(s.dtype.element_ty), mask=mask)
    else:
        bias = tl.load(line + BIAS).to(tl.pointer_type(tl.float32))
        value += tl.load(bias + columns, mask=inside, other=0.0)[None, :]
        a = value.to(s.dtype.element_ty)
        tl.store(here, a, mask=mask)
        # What pads the rank stays zero: products read it.
        result = _apply(a.to(tl.float32), number).to(out.dtype.element_ty)
        tl.store(there, tl.where(inside[None, :], result, 0.0), mask=(rows < end)[:, None] & (columns < width)[None, :])


@jit
def _bias_sums(  # type: ignore[no-untyped-def]
    da,
    table,
    owners,
    owned,
    stride_s,
    module,
    num_modules,
    rank_blocks,
    GRAD_BIAS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
):
    num_items = tl.load(owners).to(tl.int32) * rank_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner = owners + (1 + item // rank_blocks) * 4
        first_span, last_span, slot = tl.load(owner), tl.load(owner + 1), tl.load(owner + 2)
        line = line_of(table, slot, module, num_modules)
        grad = tl.load(line + GRAD_BIAS)
        columns = (item % rank_blocks) * BR + tl.arange(0, BR)
        inside = columns < tl.load(line).to(tl.int32)
        if grad != 0:
            here = grad.to(tl.pointer_type(tl.float32)) + columns
            total = tl.load(here, mask=inside, other=0.0)
            for span in range(first_span, last_span):
                start, end = tl.load(owned + span * 2), tl.load(owned + span * 2 + 1)
                acc = tl.zeros((BR,), dtype=tl.float32)
                for t in range(start, end, BT):
                    rows = t + tl.arange(0, BT)
                    mask = (rows < end)[:, None] & inside[None, :]
                    value = tl.load(da + rows.to(tl.int64)[:, None] * stride_s + columns[None, :], mask=mask, other=0.0)
                    acc += tl.sum(value.to(tl.float32), axis=0)
                total += acc
            tl.store(here, total, mask=inside)


def _launch_activate(
    s_TR: torch.Tensor, out_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable, back: bool
) -> None:
    block = min(64, table.rank_class)
    _activate[(len(rows.tiles_N4), table.rank_class // block)](
        s_TR,
        out_TR,
        table.device_SMF,
        rows.tiles_N4,
        s_TR.stride(0),
        out_TR.stride(0),
        site.module,
        table.num_modules,
        BACK=back,
        MORE=MORE,
        BIAS=_BIAS,
        BM=ROW_TILE,
        BR=block,
    )


def activate_kernel(s_TR: torch.Tensor, out_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    _launch_activate(s_TR, out_TR, site, rows, table, back=False)


def activate_grad_kernel(
    ds_TR: torch.Tensor, a_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable
) -> None:
    _launch_activate(ds_TR, a_TR, site, rows, table, back=True)


def bias_sums_kernel(da_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    _bias_sums[(NUM_PROGRAMS,)](
        da_TR,
        table.device_SMF,
        rows.owners_J4,
        rows.owned_G2,
        da_TR.stride(0),
        site.module,
        table.num_modules,
        table.rank_class // _COLUMNS,
        GRAD_BIAS=_GRAD_BIAS,
        BT=_ROWS,
        BR=_COLUMNS,
    )


activate = on_device(activate_kernel, activate_reference)
"""Replaces S of every owner with a non-linearity by a = S + bias, and writes f(a) into `out_TR`."""


def activate_grad(ds_TR: torch.Tensor, a_TR: torch.Tensor, site: Site, rows: RowTables, table: SlotTable) -> None:
    """Replaces ds by the gradient of a, and adds to that of the biases."""
    if runs_triton(ds_TR):
        activate_grad_kernel(ds_TR, a_TR, site, rows, table)
        bias_sums_kernel(ds_TR, site, rows, table)
    else:
        activate_grad_reference(ds_TR, a_TR, site, rows, table)
        bias_sums_reference(ds_TR, site, rows, table)
