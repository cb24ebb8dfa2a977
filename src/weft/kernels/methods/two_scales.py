"""A matrix that modules share, with rows and columns scaled by each one's own vectors: VeRA's b ⊙ B ⊙ d.

    made[m] = b[m] ⊙ B ⊙ d[m]              (M, O, P), rounded once
Given the gradients G (M, O, R) of these, with H = G ⊙ B:
    db[m] = H d[m],   dd[m] = H[m]ᵀ b[m]   in fp32; G is cleared
Every sum has a fixed order: rows in blocks from the first to the last of a stretch, then stretch after stretch.

Shape suffixes: M modules, O out, R rank, P rank padded, C stretches of rows.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, jit, next_power_of_2, on_device, tl

_NUMBERS = 4096
_STRETCH = 1024
"""Rows of a program, block after block."""


def scale_reference(
    shared_OR: torch.Tensor, rows_MO: torch.Tensor, columns_MR: torch.Tensor, out_MOP: torch.Tensor
) -> None:
    """The reference implementation of `scale`, module by module: no more memory than one large module takes."""
    rank = columns_MR.shape[1]
    for rows_O, columns_R, out_OP in zip(rows_MO, columns_MR, out_MOP, strict=True):
        torch.mul(rows_O[:, None] * shared_OR, columns_R, out=out_OP[:, :rank])


def scales_grad_reference(
    grad_MOR: torch.Tensor, shared_OR: torch.Tensor, rows_MO: torch.Tensor, columns_MR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    h_MOR = grad_MOR.mul_(shared_OR)
    grads = h_MOR.bmm(columns_MR[:, :, None])[:, :, 0], rows_MO[:, None].bmm(h_MOR)[:, 0]
    grad_MOR.zero_()
    return grads


@jit
def _scale(  # type: ignore[no-untyped-def]
    shared, row_scales, column_scales, out, stride_shared, num_out, rank, width, BO: tl.constexpr, BR: tl.constexpr
):
    module = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BO + tl.arange(0, BO)
    columns = tl.arange(0, BR)
    row_mask, has = rows < num_out, columns < rank
    there = row_mask[:, None] & has[None, :]
    by_row = tl.load(row_scales + module * num_out + rows, mask=row_mask, other=0.0)
    by_column = tl.load(column_scales + module * rank + columns, mask=has, other=0.0)
    value = tl.load(shared + rows.to(tl.int64)[:, None] * stride_shared + columns[None, :], mask=there, other=0.0)
    value = by_row[:, None] * value * by_column[None, :]
    here = out + (module * num_out + rows)[:, None] * width + columns[None, :]
    tl.store(here, value.to(out.dtype.element_ty), mask=there)


@jit
def _scales_grad(  # type: ignore[no-untyped-def]
    grad,
    shared,
    row_scales,
    column_scales,
    to_rows,
    to_columns,
    stride_shared,
    num_out,
    rank,
    STRETCH: tl.constexpr,
    BO: tl.constexpr,
    BR: tl.constexpr,
):
    module, stretch = tl.program_id(1).to(tl.int64), tl.program_id(0)
    columns = tl.arange(0, BR)
    has = columns < rank
    by_column = tl.load(column_scales + module * rank + columns, mask=has, other=0.0)
    total = tl.zeros((BR,), dtype=tl.float32)
    for first in range(stretch * STRETCH, tl.minimum((stretch + 1) * STRETCH, num_out), BO):
        rows = first + tl.arange(0, BO)
        row_mask = rows < num_out
        there = row_mask[:, None] & has[None, :]
        here = grad + (module * num_out + rows)[:, None] * rank + columns[None, :]
        value = tl.load(here, mask=there, other=0.0)
        tl.store(here, tl.zeros((BO, BR), dtype=tl.float32), mask=there)
        value *= tl.load(shared + rows.to(tl.int64)[:, None] * stride_shared + columns[None, :], mask=there, other=0.0)
        by_row = tl.load(row_scales + module * num_out + rows, mask=row_mask, other=0.0)
        tl.store(to_rows + module * num_out + rows, tl.sum(value * by_column[None, :], axis=1), mask=row_mask)
        total += tl.sum(value * by_row[:, None], axis=0)
    tl.store(to_columns + (module * tl.num_programs(0) + stretch) * rank + columns, total, mask=has)


def _blocks(rank: int) -> dict[str, int]:
    width = max(16, next_power_of_2(rank))
    return {"BO": max(1, _NUMBERS // width), "BR": width}


def scale_kernel(
    shared_OR: torch.Tensor, rows_MO: torch.Tensor, columns_MR: torch.Tensor, out_MOP: torch.Tensor
) -> None:
    (num_modules, num_out), rank = rows_MO.shape, columns_MR.shape[1]
    blocks = _blocks(rank)
    _scale[(cdiv(num_out, blocks["BO"]), num_modules)](
        shared_OR, rows_MO, columns_MR, out_MOP, shared_OR.stride(0), num_out, rank, out_MOP.shape[2], **blocks
    )


def scales_grad_kernel(
    grad_MOR: torch.Tensor, shared_OR: torch.Tensor, rows_MO: torch.Tensor, columns_MR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_modules, num_out, rank = grad_MOR.shape
    num_stretches = cdiv(num_out, _STRETCH)
    to_rows_MO = torch.empty_like(rows_MO)
    to_columns_MCR = rows_MO.new_empty(num_modules, num_stretches, rank)
    _scales_grad[(num_stretches, num_modules)](
        grad_MOR,
        shared_OR,
        rows_MO,
        columns_MR,
        to_rows_MO,
        to_columns_MCR,
        shared_OR.stride(0),
        num_out,
        rank,
        STRETCH=_STRETCH,
        **_blocks(rank),
    )
    return to_rows_MO, to_columns_MCR.sum(dim=1)


scale = on_device(scale_kernel, scale_reference)
"""Writes the shared matrix with each module's scales; padding of the rank is left alone."""


scales_grad = on_device(scales_grad_kernel, scales_grad_reference)
"""The gradients of the scales of rows (M, O) and columns (M, R) from those of the scaled matrices, which are set to
zero afterwards."""
