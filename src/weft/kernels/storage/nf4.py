"""Weights in four bits: NF4, the 16 levels of QLoRA, in blocks of 64 with one fp32 scale each.

For each block of 64 neighbouring weights of a row:
    absmax    = max |w|
    code      = the level nearest to w / absmax       4 bits
    dequantise:  w ≈ level[code] · absmax

The levels put equally many of a normal distribution's weights between any two: seven quantiles below zero, zero
itself, eight above, scaled to [-1, 1]. Two codes share a byte, the first in its upper half. A row whose length is no
multiple of 64 ends in a shorter block, so every row begins a block and rows can be cut apart.

The one reduction is a maximum over a block, which has no order. A weight depends on its own block alone; activations
and their NaNs never come here.

Shape suffixes: O out (rows), D in (columns), G blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
import torch.nn.functional as F

from weft.kernels.launch import cdiv, jit, next_power_of_2, runs_triton, tl

GROUP = 64
"""Weights that share a scale."""
_ROWS_AT_ONCE = 1024
"""Rows quantised together, which limits the temporary memory."""


@lru_cache(maxsize=1)
def levels() -> tuple[float, ...]:
    """The 16 levels, in rising order.

    The outermost quantile leaves half a level's share of the distribution outside, averaged over the two sides.
    """
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
    """A weight (O, D) in four bits."""

    codes: torch.Tensor
    """uint8 (O, G · 32): two codes per byte."""
    absmax_OG: torch.Tensor
    """fp32."""
    shape: tuple[int, int]


@torch.no_grad()
def quantise_nf4(weight_OD: torch.Tensor) -> Nf4Codes:
    """The nearest four-bit weight, made once when a backbone is loaded."""
    parts = [_quantise_rows(rows) for rows in weight_OD.split(_ROWS_AT_ONCE)]
    codes, absmax_OG = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Nf4Codes(codes, absmax_OG, (weight_OD.shape[0], weight_OD.shape[1]))


def _quantise_rows(weight_OD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
def _dequantise(  # type: ignore[no-untyped-def]
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
    _dequantise[(num_out, cdiv(num_bytes, block))](
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
