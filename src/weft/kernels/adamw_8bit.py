"""AdamW with moments of 8 bits, for every job that steps now: `kernels/adamw.py` with other stores for m and √v.

Numbers are stored in blocks of `SCALED`, each with its largest size in fp32, as codes of their share x of it: the
dynamic tree of "8-bit optimizers via block-wise quantization" (Dettmers et al. 2022). Decade d of D has 2ᵈ levels,

    level(d, k) = 10^(d-D+1) · (0.1 + 0.9 k / 2ᵈ),   k = 1 … 2ᵈ;      code = 2ᵈ - 1 + k;      code 0 is zero

with the levels at the ends of their cells instead of in the middle. So the largest of a block is kept as it is, without
which second moments would shrink at every step, and the nearest level of x is one rounding away, in a kernel too. m has
a sign and D = 7 decades. v is stored as its root, which needs half the decades of v itself, with D = 8, and never as
zero unless it is: a weight whose v were lost would be stepped by m / ε. A step computes in fp32 and then stores.

A weight costs 2 bytes and 1/32 for moments instead of 8, and a step moves 24 bytes of it instead of 36. All else is as
in `adamw.py`: three launches for all jobs, nothing summed over two of them, one read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from weft.kernels.adamw import (
    ParameterLane,
    StepTables,
    Update,
    Updated,
    adamw_reference,
    block_pointers,
    find_block,
    load_block,
    step_by_kernel,
    step_plain_lane,
    store_block,
)
from weft.kernels.device_event import sent
from weft.kernels.launch import cdiv, jit, runs_triton, tl

SCALED = 256
"""Numbers that share a scale."""
SIGNED_DECADES, ROOT_DECADES = 7, 8


@dataclass(frozen=True, eq=False)
class QuantisedLane(ParameterLane):
    """One flat buffer whose moments are codes: int8 for m, with a sign, and uint8 for √v, each with its scales."""

    exp_avg_scales: torch.Tensor
    root_scales: torch.Tensor


def quantise(values_P: torch.Tensor, decades: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of numbers; with eight decades they are at least 0 and only what is zero becomes zero."""
    num_values = values_P.numel()
    padded = torch.nn.functional.pad(values_P, (0, -num_values % SCALED)).view(-1, SCALED)
    sizes = padded.abs()
    scales = sizes.amax(dim=1)
    share = sizes / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    in_decade, num_levels = share * 10.0 ** (decades - 1), torch.ones_like(share)
    for decade in range(1, decades):
        is_above = share > 10.0 ** (decade - decades)
        in_decade = torch.where(is_above, share * 10.0 ** (decades - 1 - decade), in_decade)
        num_levels.masked_fill_(is_above, 2.0**decade)
    codes = num_levels - 1 + torch.floor((in_decade - 0.1) / 0.9 * num_levels + 0.5)
    if decades == ROOT_DECADES:
        return torch.maximum(codes, (share > 0).float()).to(torch.uint8).view(-1)[:num_values].contiguous(), scales
    return (codes * padded.sign()).to(torch.int8).view(-1)[:num_values].contiguous(), scales


def dequantise(codes_P: torch.Tensor, scales: torch.Tensor, decades: int) -> torch.Tensor:
    sizes = levels(decades).to(codes_P.device)[codes_P.to(torch.int32).abs()]
    each = scales.repeat_interleave(SCALED)[: codes_P.numel()]
    return sizes * each * torch.where(codes_P < 0, -1.0, 1.0) if decades == SIGNED_DECADES else sizes * each


@lru_cache(maxsize=4)
def levels(decades: int) -> torch.Tensor:
    """The share that each code stands for."""
    shares = [0.0]
    for decade in range(decades):
        each = [0.1 + 0.9 * (k + 1) / 2**decade for k in range(2**decade)]
        shares += [10.0 ** (decade - decades + 1) * level for level in each]
    return torch.tensor(shares)


def adamw_8bit_reference(updates: Sequence[Update], finite_J: torch.Tensor) -> list[Updated]:
    return adamw_reference(updates, finite_J, _step_lane)


def _step_lane(update: Update, lane: ParameterLane, factor: float) -> None:
    assert isinstance(lane, QuantisedLane)
    exp_avg_P = dequantise(lane.exp_avg_P, lane.exp_avg_scales, SIGNED_DECADES)
    exp_avg_sq_P = dequantise(lane.exp_avg_sq_P, lane.root_scales, ROOT_DECADES).square_()
    step_plain_lane(update, replace(lane, exp_avg_P=exp_avg_P, exp_avg_sq_P=exp_avg_sq_P), factor)
    for codes, scales, (new_codes, new_scales) in (
        (lane.exp_avg_P, lane.exp_avg_scales, quantise(exp_avg_P, SIGNED_DECADES)),
        (lane.exp_avg_sq_P, lane.root_scales, quantise(exp_avg_sq_P.sqrt(), ROOT_DECADES)),
    ):
        codes.copy_(new_codes)
        scales.copy_(new_scales)


@jit
def _scale_pointers(scales_ptr, lane, column, start, BLOCK: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    base = tl.load(scales_ptr + lane * 2 + column).to(tl.pointer_type(tl.float32))
    return base + start // SCALED + tl.arange(0, BLOCK // SCALED)


@jit
def _sizes(levels_ptr, codes, scales, BLOCK: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    shares = tl.reshape(tl.load(levels_ptr + codes), [BLOCK // SCALED, SCALED])
    return tl.reshape(shares * scales[:, None], [BLOCK])


@jit
def _scales_of(sizes, BLOCK: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.max(tl.reshape(sizes, [BLOCK // SCALED, SCALED]), 1)


@jit
def _codes(sizes, scales, DECADES: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of the nearest levels, and each number's share of the scale."""
    rows = tl.reshape(sizes, [BLOCK // SCALED, SCALED])
    share = tl.div_rn(rows, tl.where(scales > 0, scales, 1.0)[:, None] + tl.zeros_like(rows))
    share = tl.reshape(share, [BLOCK])
    in_decade = share * 10.0 ** (DECADES - 1)
    num_levels = tl.full([BLOCK], 1.0, tl.float32)
    for decade in tl.static_range(1, DECADES):
        is_above = share > 10.0 ** (decade - DECADES)
        in_decade = tl.where(is_above, share * 10.0 ** (DECADES - 1 - decade), in_decade)
        num_levels = tl.where(is_above, 2.0**decade, num_levels)
    return num_levels - 1 + tl.floor((in_decade - 0.1) / 0.9 * num_levels + 0.5), share


@jit
def _code_pointers(lanes_ptr, lane, column, start, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    base = tl.load(lanes_ptr + lane * 6 + column).to(tl.pointer_type(KIND))
    return tl.max_contiguous(tl.multiple_of(base + start + tl.arange(0, BLOCK), 16), BLOCK)


@jit
def _update_block(  # type: ignore[no-untyped-def]
    lanes_ptr,
    numbers_ptr,
    factors_ptr,
    largest_ptr,
    scales_ptr,
    levels_ptr,
    lane,
    start,
    left,
    SIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    params_ptr = block_pointers(lanes_ptr, lane, 0, start, BLOCK)
    grad_ptr = block_pointers(lanes_ptr, lane, 1, start, BLOCK)
    params = load_block(params_ptr, left, BLOCK, IS_FULL)
    factor = tl.load(factors_ptr + lane // SIDES)
    if factor >= 0:
        numbers = numbers_ptr + lane * 10
        m_ptr = _code_pointers(lanes_ptr, lane, 2, start, tl.int8, BLOCK)
        root_ptr = _code_pointers(lanes_ptr, lane, 3, start, tl.uint8, BLOCK)
        m_scales_ptr = _scale_pointers(scales_ptr, lane, 0, start, BLOCK, SCALED)
        root_scales_ptr = _scale_pointers(scales_ptr, lane, 1, start, BLOCK, SCALED)
        has_scale = tl.arange(0, BLOCK // SCALED) * SCALED < left
        grad = load_block(grad_ptr, left, BLOCK, IS_FULL) * factor
        m_codes = load_block(m_ptr, left, BLOCK, IS_FULL).to(tl.int32)
        m_scales = tl.load(m_scales_ptr, mask=has_scale, other=0.0)
        exp_avg = _sizes(levels_ptr, tl.abs(m_codes), m_scales, BLOCK, SCALED)
        exp_avg = tl.where(m_codes < 0, -exp_avg, exp_avg) * tl.load(numbers + 1) + grad * tl.load(numbers + 2)
        root_codes = load_block(root_ptr, left, BLOCK, IS_FULL).to(tl.int32)
        root_scales = tl.load(root_scales_ptr, mask=has_scale, other=0.0)
        root = _sizes(levels_ptr + 128, root_codes, root_scales, BLOCK, SCALED)
        root = tl.sqrt_rn(root * root * tl.load(numbers + 3) + grad * grad * tl.load(numbers + 4))
        scale = tl.div_rn(root, tl.load(numbers + 6)) + tl.load(numbers + 7)
        params = params * tl.load(numbers) - tl.load(numbers + 5) * tl.div_rn(exp_avg, scale)
        store_block(params_ptr, params, left, BLOCK, IS_FULL)
        if not IS_FULL:
            # Nothing beyond the lane's end may count in a scale.
            exp_avg = tl.where(tl.arange(0, BLOCK) < left, exp_avg, 0.0)
        m_scales = _scales_of(tl.abs(exp_avg), BLOCK, SCALED)
        codes, share = _codes(tl.abs(exp_avg), m_scales, 7, BLOCK, SCALED)
        store_block(m_ptr, tl.where(exp_avg < 0, -codes, codes).to(tl.int8), left, BLOCK, IS_FULL)
        tl.store(m_scales_ptr, m_scales, mask=has_scale)
        root_scales = _scales_of(root, BLOCK, SCALED)
        codes, share = _codes(root, root_scales, 8, BLOCK, SCALED)
        codes = tl.where((codes < 1) & (share > 0), 1.0, codes)
        store_block(root_ptr, codes.to(tl.uint8), left, BLOCK, IS_FULL)
        tl.store(root_scales_ptr, root_scales, mask=has_scale)
    store_block(grad_ptr, tl.zeros([BLOCK], tl.float32), left, BLOCK, IS_FULL)
    if not IS_FULL:
        params = tl.where(tl.arange(0, BLOCK) < left, params, 0.0)
    # Sizes of floats order as their bits do, with NaN above all, and the order of a maximum does not matter.
    sizes = tl.abs(params).to(tl.int32, bitcast=True)
    tl.atomic_max(largest_ptr + lane // SIDES, tl.max(sizes, 0), sem="relaxed")


@jit
def _update_8bit_kernel(  # type: ignore[no-untyped-def]
    lanes_ptr,
    numbers_ptr,
    factors_ptr,
    largest_ptr,
    scales_ptr,
    levels_ptr,
    num_lanes,
    SIDES: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    lane, start, left = find_block(lanes_ptr, num_lanes, BLOCK, LANES)
    if left >= BLOCK:
        _update_block(
            lanes_ptr, numbers_ptr, factors_ptr, largest_ptr, scales_ptr, levels_ptr, lane, start, left, SIDES, BLOCK,
            SCALED, True,
        )  # fmt: skip
    else:
        _update_block(
            lanes_ptr, numbers_ptr, factors_ptr, largest_ptr, scales_ptr, levels_ptr, lane, start, left, SIDES, BLOCK,
            SCALED, False,
        )  # fmt: skip


def adamw_8bit_kernel(updates: Sequence[Update], finite_J: torch.Tensor) -> Callable[[], list[Updated]]:
    return step_by_kernel(updates, finite_J, _launch_update)


def _launch_update(tables: StepTables) -> None:
    device = tables.lanes_L6.device
    scales = [[lane.exp_avg_scales.data_ptr(), lane.root_scales.data_ptr()] for lane in _quantised(tables.lanes)]
    both = torch.cat([levels(SIGNED_DECADES), levels(ROOT_DECADES)])
    grid, lane_tables = (tables.num_blocks,), (tables.lanes_L6, tables.numbers_L10, tables.factors_J, tables.largest_J)
    more = (sent(torch.tensor(scales), device), sent(both, device), len(tables.lanes), tables.sides, SCALED)
    _update_8bit_kernel[grid](*lane_tables, *more, **tables.shared)


def _quantised(lanes: Sequence[ParameterLane]) -> list[QuantisedLane]:
    quantised = [lane for lane in lanes if isinstance(lane, QuantisedLane)]
    assert len(quantised) == len(lanes), "all jobs of a call have moments of 8 bits"
    return quantised


def adamw_8bit(updates: Sequence[Update], finite_J: torch.Tensor | None = None) -> Callable[[], list[Updated]]:
    """Starts the steps of all jobs given, each as if alone; gradients are zero afterwards. Otherwise as `adamw`."""
    assert updates
    if finite_J is None:
        finite_J = torch.ones(len(updates), device=updates[0].lanes[0].params_P.device)
    for lane in _quantised([lane for update in updates for lane in update.lanes]):
        size, num_scales = lane.params_P.shape, cdiv(lane.params_P.numel(), SCALED)
        assert lane.exp_avg_P.dtype is torch.int8 and lane.exp_avg_sq_P.dtype is torch.uint8
        assert lane.grad_P.shape == lane.exp_avg_P.shape == lane.exp_avg_sq_P.shape == size
        assert lane.exp_avg_scales.numel() == lane.root_scales.numel() == num_scales
    if runs_triton(finite_J):
        return adamw_8bit_kernel(updates, finite_J)
    results = adamw_8bit_reference(updates, finite_J)
    return lambda: results
