"""Frozen weights in fewer bits: 8-bit floats, 8-bit integers, and NF4.

8-bit floats with one fp32 scale per row, as factors of an FP8 product. `quantise_rows`, for each row t of x_TK (times
columns_K, where given):
    scale_t = max_k |x_tk| / 448                    448 is the largest e4m3 number
    q_tk    = e4m3(x_tk · 448 / max_k |x_tk|)       so x ≈ q · scale, to 1 part in 16 or better
dequantise:  w_nk = q_nk · scale_n
Used by adapters/frozen.py for y = x Wᵀ with W ≈ w8_OD · scale_O[:, None]:
    forward     x ≈ x8 · sx        y  = (x8 w8ᵀ) · sx · scale_O
    backward    dy · scale_O ≈ d8 · sd        dx = (d8 w8) · sd
The backward multiplies dy by the weight's scales before rounding (`columns_K`), so it multiplies the very numbers of
the forward, transposed: dx is the gradient of what was computed, and the transposed copy needs no scales of its own. A
NaN or an infinity makes its own row's scale NaN or infinite, hence its products, and changes nothing elsewhere.

8-bit integers with one fp32 scale per row, converted back by the same `dequantise`:
    scale_o = max_d |w_od| / 127
    q_od    = round(w_od / scale_o)        so w ≈ q · scale, off by at most half a scale

NF4, the 16 levels of QLoRA, for each block of 64 neighbouring weights of a row:
    absmax    = max |w|
    code      = the level nearest to w / absmax       4 bits
    dequantise:  w ≈ level[code] · absmax
The levels put equally many of a normal distribution's weights between any two: seven quantiles below zero, zero itself,
eight above, scaled to [-1, 1]. Two codes share a byte, the first in its upper half. A row whose length is no multiple
of 64 ends in a shorter block, so every row begins a block and rows can be cut apart.

The one reduction is a maximum over a row or a block, which has no order; a result depends on that row or block alone.

Shape suffixes: T or N rows, K columns; O out (rows), D in (columns), G blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.kernels.device import capability, is_gpu
from weft.kernels.launch import cdiv, jit, next_power_of_2, runs_triton, tl

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
TINIEST = 2.0**-100
"""Replacement for the largest number of a row of zeros; gradients of single tokens are far above it."""


class Rows8(NamedTuple):
    """Rows of 8-bit floats: x ≈ q · scale."""

    q_TK: torch.Tensor
    """e4m3."""
    scale_T: torch.Tensor
    """fp32."""


def quantise_rows_reference(x_TK: torch.Tensor, columns_K: torch.Tensor | None = None) -> Rows8:
    x_TK = x_TK.float() if columns_K is None else x_TK.float() * columns_K
    amax_T = x_TK.abs().amax(dim=1).clamp(min=TINIEST)
    return Rows8((x_TK * (LARGEST / amax_T)[:, None]).to(FP8), amax_T / LARGEST)


def dequantise_reference(q_NK: torch.Tensor, scale_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (q_NK.float() * scale_N[:, None]).to(dtype)


ROW_BLOCK = 32_768
"""Longest row held in registers between its maximum and its rounding: 32 numbers for each of 1,024 threads. Longer rows
are read twice, the second time from cache: on an H200 28,672 columns took 240 us held and 395 us read twice."""
COPY_BLOCK = 2_048


TINIEST_BITS = (127 - 100) << 23
"""TINIEST as the integer with the same bits."""


def _num_warps(block: int) -> int:
    return min(32, max(4, block // 1024))


@jit
def size_bits(x):  # type: ignore[no-untyped-def]
    """|x| as the integer with the same bits: in the same order, with NaN the largest, which a float maximum skips."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _quantise_rows(  # type: ignore[no-untyped-def]
    x_ptr,
    columns_ptr,
    q_ptr,
    scale_ptr,
    num_columns,
    row_stride,
    HAS_COLUMNS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    q_ptr += row * num_columns
    lane = tl.arange(0, BLOCK)
    if ONE_BLOCK:
        inside = lane < num_columns
        x = tl.load(x_ptr + lane, mask=inside, other=0.0).to(tl.float32)
        if HAS_COLUMNS:
            x *= tl.load(columns_ptr + lane, mask=inside, other=0.0)
        amax = tl.maximum(tl.max(size_bits(x), axis=0), FLOOR_BITS).to(tl.float32, bitcast=True)
        tl.store(q_ptr + lane, (x * tl.div_rn(LIMIT, amax)).to(tl.float8e4nv), mask=inside)
    else:
        largest = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_columns, BLOCK):
            inside = start + lane < num_columns
            x = tl.load(x_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
            if HAS_COLUMNS:
                x *= tl.load(columns_ptr + start + lane, mask=inside, other=0.0)
            largest = tl.maximum(largest, size_bits(x))
        amax = tl.maximum(tl.max(largest, axis=0), FLOOR_BITS).to(tl.float32, bitcast=True)
        factor = tl.div_rn(LIMIT, amax)
        for start in range(0, num_columns, BLOCK):
            inside = start + lane < num_columns
            x = tl.load(x_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
            if HAS_COLUMNS:
                x *= tl.load(columns_ptr + start + lane, mask=inside, other=0.0)
            tl.store(q_ptr + start + lane, (x * factor).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, tl.div_rn(amax, LIMIT))


@jit
def _dequantise(  # type: ignore[no-untyped-def]
    q_ptr, scale_ptr, w_ptr, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    q = tl.load(q_ptr + row * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    w = q * tl.load(scale_ptr + row)
    tl.store(w_ptr + row * num_columns + column, w.to(w_ptr.dtype.element_ty), mask=inside)


@lru_cache(maxsize=64)
def has_fp8(device: torch.device) -> bool:
    """True if a device multiplies and converts 8-bit floats itself: NVIDIA GPUs from 8.9 (Ada, Hopper) on."""
    return is_gpu(device) and capability(device) >= (8, 9)


def quantise_rows(x_TK: torch.Tensor, columns_K: torch.Tensor | None = None) -> Rows8:
    """The nearest such rows; `columns_K` (fp32) first multiplies every row."""
    if runs_triton(x_TK) and has_fp8(x_TK.device):
        return quantise_rows_kernel(x_TK, columns_K)
    return quantise_rows_reference(x_TK, columns_K)


def quantise_rows_kernel(x_TK: torch.Tensor, columns_K: torch.Tensor | None = None) -> Rows8:
    num_rows, num_columns = x_TK.shape
    assert columns_K is None or (columns_K.shape == (num_columns,) and columns_K.is_contiguous())
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    q_TK = torch.empty(num_rows, num_columns, dtype=FP8, device=x_TK.device)
    scale_T = torch.empty(num_rows, dtype=torch.float32, device=x_TK.device)
    block = min(next_power_of_2(num_columns), ROW_BLOCK)
    _quantise_rows[(num_rows,)](
        x_TK,
        scale_T if columns_K is None else columns_K,
        q_TK,
        scale_T,
        num_columns,
        x_TK.stride(0),
        HAS_COLUMNS=columns_K is not None,
        ONE_BLOCK=num_columns <= block,
        BLOCK=block,
        LIMIT=LARGEST,
        FLOOR_BITS=TINIEST_BITS,
        num_warps=_num_warps(block),
    )
    return Rows8(q_TK, scale_T)


def dequantise(q_NK: torch.Tensor, scale_N: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The dense weight of 8-bit rows, floats or integers, and their scales."""
    if runs_triton(q_NK) and (q_NK.dtype is not FP8 or has_fp8(q_NK.device)):
        return dequantise_kernel(q_NK, scale_N, dtype)
    return dequantise_reference(q_NK, scale_N, dtype)


def dequantise_kernel(q_NK: torch.Tensor, scale_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    num_rows, num_columns = q_NK.shape
    assert q_NK.is_contiguous() and scale_N.shape == (num_rows,) and scale_N.is_contiguous()
    w_NK = torch.empty(num_rows, num_columns, dtype=dtype, device=q_NK.device)
    block = min(next_power_of_2(num_columns), COPY_BLOCK)
    grid = (num_rows, cdiv(num_columns, block))
    _dequantise[grid](q_NK, scale_N, w_NK, num_columns, BLOCK=block, num_warps=4)
    return w_NK


LARGEST_INT8 = 127.0
TINIEST_ROW = 1e-30
"""Replacement for the largest number of a row of zeros."""


@torch.no_grad()
def quantise_int8(weight_OD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_OD in int8, scale_O in fp32) with w ≈ q · scale, made once when a backbone is loaded."""
    parts = [_int8_rows(rows) for rows in weight_OD.split(_ROWS_AT_ONCE)]
    q_OD, scale_O = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return q_OD, scale_O


def _int8_rows(weight_OD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight_OD = weight_OD.float()
    scale_O = weight_OD.abs().amax(dim=1).clamp(min=TINIEST_ROW) / LARGEST_INT8
    return (weight_OD / scale_O[:, None]).round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scale_O


GROUP = 64
_ROWS_AT_ONCE = 1024
"""Rows quantised together, which limits the temporary memory."""


@lru_cache(maxsize=1)
def levels() -> tuple[float, ...]:
    """The 16 levels, in rising order. The outermost quantile leaves half a level's share of the distribution outside,
    averaged over the two sides."""
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(outermost + (0.5 - outermost) * i / 8) for i in range(8)]
    below = [-quantile(outermost + (0.5 - outermost) * i / 7) for i in range(7)]
    return tuple(level / above[0] for level in sorted([*below, 0.0, *above]))


@lru_cache(maxsize=16)
def _level_tensor(device: torch.device) -> torch.Tensor:
    return torch.tensor(levels(), dtype=torch.float32, device=device)


@dataclass(frozen=True, eq=False)
class Nf4Codes:
    codes: torch.Tensor
    """uint8 (O, G · 32): two codes per byte."""
    absmax_OG: torch.Tensor
    """fp32."""
    shape: tuple[int, int]


@torch.no_grad()
def quantise_nf4(weight_OD: torch.Tensor) -> Nf4Codes:
    """The nearest four-bit weight, made once when a backbone is loaded."""
    parts = [_nf4_rows(rows) for rows in weight_OD.split(_ROWS_AT_ONCE)]
    codes, absmax_OG = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Nf4Codes(codes, absmax_OG, (weight_OD.shape[0], weight_OD.shape[1]))


def _nf4_rows(weight_OD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_out, num_in = weight_OD.shape
    padded = F.pad(weight_OD.float(), (0, -num_in % GROUP)).view(num_out, -1, GROUP)
    absmax_OG = padded.abs().amax(dim=2)
    # A block of zeros has no scale to divide by; any would do.
    scaled = padded / torch.where(absmax_OG > 0, absmax_OG, 1.0)[:, :, None]
    level = _level_tensor(weight_OD.device)
    middle = (level[1:] + level[:-1]) / 2
    codes = torch.bucketize(scaled, middle, out_int32=True).to(torch.uint8).view(num_out, -1, 2)
    return (codes[:, :, 0] << 4) | codes[:, :, 1], absmax_OG


def dequantise_nf4_reference(weight: Nf4Codes, dtype: torch.dtype) -> torch.Tensor:
    num_out, num_in = weight.shape
    codes = torch.stack([weight.codes >> 4, weight.codes & 15], dim=2).view(num_out, -1, GROUP)
    level = _level_tensor(codes.device)[codes.int()]
    return (level * weight.absmax_OG[:, :, None]).view(num_out, -1)[:, :num_in].to(dtype).contiguous()


BYTES_BLOCK = 1_024
"""Bytes per program, 2,048 weights: 8 bytes for each of 128 threads, one vector load."""


@jit
def _dequantise_codes(  # type: ignore[no-untyped-def]
    codes_ptr, absmax_ptr, level_ptr, w_ptr, num_columns, num_bytes, num_groups, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    inside = byte < num_bytes
    code = tl.load(codes_ptr + row * num_bytes + byte, mask=inside, other=0).to(tl.int32)
    # 32 bytes make a group of 64 weights.
    absmax = tl.load(absmax_ptr + row * num_groups + byte // 32, mask=inside, other=0.0)
    first = tl.load(level_ptr + (code >> 4)) * absmax
    second = tl.load(level_ptr + (code & 15)) * absmax
    w = tl.interleave(first, second).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + row * num_columns + column, w, mask=column < num_columns)


def dequantise_nf4(weight: Nf4Codes, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The dense weight (O, D)."""
    if runs_triton(weight.codes):
        return dequantise_nf4_kernel(weight, dtype)
    return dequantise_nf4_reference(weight, dtype)


def dequantise_nf4_kernel(weight: Nf4Codes, dtype: torch.dtype) -> torch.Tensor:
    num_out, num_in = weight.shape
    num_bytes, num_groups = weight.codes.shape[1], weight.absmax_OG.shape[1]
    assert weight.codes.is_contiguous() and weight.absmax_OG.is_contiguous()
    assert num_groups == cdiv(num_in, GROUP) and num_bytes == num_groups * GROUP // 2
    w_OD = torch.empty(num_out, num_in, dtype=dtype, device=weight.codes.device)
    block = min(next_power_of_2(num_bytes), BYTES_BLOCK)
    _dequantise_codes[(num_out, cdiv(num_bytes, block))](
        weight.codes,
        weight.absmax_OG,
        _level_tensor(weight.codes.device),
        w_OD,
        num_in,
        num_bytes,
        num_groups,
        BLOCK=block,
        num_warps=4,
    )
    return w_OD
