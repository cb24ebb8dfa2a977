"""AdamW for every job that steps now, in one go: clipped, checked and stepped job by job.

    norm   = ‖(grad of every lane)‖                       per job
    factor = min(1, max_grad_norm / (norm + 1e-6))        1 without a limit; no update if loss or norm is not finite
    g = factor · grad;  m ← β₁ m + (1-β₁) g;  v ← β₂ v + (1-β₂) g²
    w ← (1 - rate · decay) w - rate / (1-β₁ᵗ) · m / (√v / √(1-β₂ᵗ) + ε)
    grad ← 0;  largest = max |w|                          per job

This is torch.optim.AdamW after torch's clip_grad_norm_. A job is one or more lanes: its flat buffers (LoRA: A and
B), each of P numbers with gradient and moments, all fp32 and changed in place. Three launches serve all jobs: squares
(a sum per block of `BLOCK` numbers), norms (a job's blocks in their order), update. A lane's blocks begin at its own
start and nothing is summed over two jobs, so a job's bits depend neither on who steps with it nor on the order; a NaN
in another job does nothing. What all jobs' steps did comes back in one read, and no one has to wait for it: other work
may be launched first. Every job has as many lanes in the tables as the one with most, at least two; those it
does not need are empty and have no blocks. Sizes: J jobs, S lanes of a job, L = S J lanes, P numbers of a lane.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from weft.kernels.device_event import AsyncCopy, sent
from weft.kernels.launch import cdiv, jit, next_power_of_2, runs_triton, tl


@dataclass(frozen=True, eq=False)
class ParameterLane:
    params_P: torch.Tensor
    grad_P: torch.Tensor
    exp_avg_P: torch.Tensor
    exp_avg_sq_P: torch.Tensor
    rate: float

    def emptied(self) -> Self:
        named: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        none = {name: value[:0] for name, value in named.items() if isinstance(value, torch.Tensor)}
        return type(self)(**{**named, **none})


@dataclass(frozen=True, eq=False)
class Update:
    """One job's step: what to change, and how."""

    lanes: tuple[ParameterLane, ...]
    number: int
    """Number of this update of the job, counted from 1."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    """0: no limit."""
    is_finite: bool
    """False if the host knows that the loss is not finite; the update is then skipped."""


@dataclass(frozen=True)
class Updated:
    grad_norm: float
    """Norm before clipping."""
    largest: float
    """Largest absolute value of a weight after the step."""
    skipped: bool
    """True if the loss or the gradient was not finite: weights and moments stayed as they were."""
    error: Exception | None = None
    """Exception that this job's step raised; its neighbours have been stepped all the same."""


StepLane = Callable[[Update, ParameterLane, float], None]
"""Steps one buffer of a job by its gradient times a factor."""


def adamw_reference(
    updates: Sequence[Update],
    finite_J: torch.Tensor,
    step_lane: StepLane | None = None,
    norms_J: torch.Tensor | None = None,
) -> list[Updated]:
    """The same in plain torch, job by job; `step_lane` steps one buffer."""
    step_lane = step_lane or step_plain_lane
    results = []
    for job, (update, is_finite) in enumerate(zip(updates, finite_J.tolist(), strict=True)):
        norm = float(norm_reference([lane.grad_P for lane in update.lanes]) if norms_J is None else norms_J[job])
        skipped = not (update.is_finite and is_finite and math.isfinite(norm))
        limit = update.max_grad_norm / (norm + 1e-6) if update.max_grad_norm else 1.0
        for lane in update.lanes:
            if not skipped:
                step_lane(update, lane, min(1.0, limit))
            lane.grad_P.zero_()
        largest = float(torch.stack([lane.params_P.abs().max() for lane in update.lanes]).max())
        results.append(Updated(norm, largest, skipped))
    return results


def norm_reference(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    norm: torch.Tensor = torch.stack([grad.norm() for grad in grads]).norm()
    return norm


def step_plain_lane(update: Update, lane: ParameterLane, factor: float) -> None:
    decay, beta1, rest1, beta2, rest2, size, root2, eps = _numbers(update, lane)[:8]
    grad_P = lane.grad_P * factor
    lane.exp_avg_P.mul_(beta1).add_(grad_P, alpha=rest1)
    lane.exp_avg_sq_P.mul_(beta2).addcmul_(grad_P, grad_P, value=rest2)
    scale_P = (lane.exp_avg_sq_P.sqrt() / root2).add_(eps)
    lane.params_P.mul_(decay).addcdiv_(lane.exp_avg_P, scale_P, value=-size)


BLOCK = 4096
"""Numbers per program, 16 for each thread of 8 warps: four loads of 16 bytes in flight from each of four buffers."""
NUM_WARPS = 8
FEWEST_LANES = 64
"""Lanes that a program searches for its own; with more jobs the kernels are compiled again."""
CHUNK = 1024
"""Block sums added at once; 20 million numbers of a lane have five chunks."""


@jit
def block_pointers(lanes_ptr, lane, column, start, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of one of a lane's buffers, which begin at multiples of 16 bytes."""
    base = tl.load(lanes_ptr + lane * 6 + column).to(tl.pointer_type(tl.float32))
    return tl.max_contiguous(tl.multiple_of(base + start + tl.arange(0, BLOCK), 16), BLOCK)


@jit
def load_block(pointers, left, BLOCK: tl.constexpr, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of a block, zeros beyond the lane's end; a full block is not masked, so that its loads are wide."""
    return tl.load(pointers) if IS_FULL else tl.load(pointers, mask=tl.arange(0, BLOCK) < left, other=0.0)


@jit
def store_block(pointers, values, left, BLOCK: tl.constexpr, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=tl.arange(0, BLOCK) < left)


@jit
def _square_sum(lanes_ptr, lane, start, left, BLOCK: tl.constexpr, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    grad = load_block(block_pointers(lanes_ptr, lane, 1, start, BLOCK), left, BLOCK, IS_FULL)
    return tl.sum(grad * grad, 0)


@jit
def find_block(lanes_ptr, num_lanes, BLOCK: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's lane, the start of its block in it, and the numbers left from there on."""
    block = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    firsts = tl.load(lanes_ptr + lanes * 6 + 5, mask=lanes < num_lanes, other=9223372036854775807)
    lane = tl.sum((firsts <= block).to(tl.int32), 0) - 1
    start = (block - tl.load(lanes_ptr + lane * 6 + 5)) * BLOCK
    return lane, start, tl.load(lanes_ptr + lane * 6 + 4) - start


@jit
def _squares_kernel(lanes_ptr, sums_ptr, num_lanes, BLOCK: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    lane, start, left = find_block(lanes_ptr, num_lanes, BLOCK, LANES)
    target = sums_ptr + tl.program_id(0)
    if left >= BLOCK:
        tl.store(target, _square_sum(lanes_ptr, lane, start, left, BLOCK, True))
    else:
        tl.store(target, _square_sum(lanes_ptr, lane, start, left, BLOCK, False))


@jit
def _norms_kernel(  # type: ignore[no-untyped-def]
    lanes_ptr,
    numbers_ptr,
    finite_ptr,
    sums_ptr,
    norms_ptr,
    factors_ptr,
    SIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_KNOWN: tl.constexpr,
):
    """A job's gradient norm, and the factor of its gradient: negative if the step is skipped. Where a job's gradient is
    divided over several devices the norm is known already."""
    job = tl.program_id(0)
    if IS_KNOWN:
        norm = tl.load(norms_ptr + job)
    else:
        total = 0.0
        for side in tl.static_range(SIDES):
            lane = SIDES * job + side
            num_blocks = (tl.load(lanes_ptr + lane * 6 + 4) + BLOCK - 1) // BLOCK
            lane_sums = sums_ptr + tl.load(lanes_ptr + lane * 6 + 5)
            sums = tl.zeros([CHUNK], tl.float32)
            for first in range(0, num_blocks, CHUNK):
                blocks = first + tl.arange(0, CHUNK)
                sums += tl.load(lane_sums + blocks, mask=blocks < num_blocks, other=0.0)
            total += tl.sum(sums, 0)
        norm = tl.sqrt_rn(total)
    limit = tl.load(numbers_ptr + job * SIDES * 10 + 8)
    factor = tl.div_rn(limit, norm + 1e-6)
    factor = tl.where((limit > 0) & (factor < 1), factor, 1.0)
    is_finite = (tl.load(numbers_ptr + job * SIDES * 10 + 9) > 0) & (tl.load(finite_ptr + job) > 0)
    if not IS_KNOWN:
        tl.store(norms_ptr + job, norm)
    tl.store(factors_ptr + job, tl.where(is_finite & (norm < float("inf")), factor, -1.0))


@jit
def _update_block(  # type: ignore[no-untyped-def]
    lanes_ptr,
    numbers_ptr,
    factors_ptr,
    largest_ptr,
    lane,
    start,
    left,
    SIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    params_ptr = block_pointers(lanes_ptr, lane, 0, start, BLOCK)
    grad_ptr = block_pointers(lanes_ptr, lane, 1, start, BLOCK)
    params = load_block(params_ptr, left, BLOCK, IS_FULL)
    factor = tl.load(factors_ptr + lane // SIDES)
    if factor >= 0:
        numbers = numbers_ptr + lane * 10
        exp_avg_ptr = block_pointers(lanes_ptr, lane, 2, start, BLOCK)
        exp_avg_sq_ptr = block_pointers(lanes_ptr, lane, 3, start, BLOCK)
        grad = load_block(grad_ptr, left, BLOCK, IS_FULL) * factor
        exp_avg = load_block(exp_avg_ptr, left, BLOCK, IS_FULL) * tl.load(numbers + 1)
        exp_avg += grad * tl.load(numbers + 2)
        exp_avg_sq = load_block(exp_avg_sq_ptr, left, BLOCK, IS_FULL) * tl.load(numbers + 3)
        exp_avg_sq += grad * grad * tl.load(numbers + 4)
        # The rounded root and quotients: the quick ones take tiny second moments for zero.
        scale = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(numbers + 6)) + tl.load(numbers + 7)
        params = params * tl.load(numbers) - tl.load(numbers + 5) * tl.div_rn(exp_avg, scale)
        store_block(params_ptr, params, left, BLOCK, IS_FULL)
        store_block(exp_avg_ptr, exp_avg, left, BLOCK, IS_FULL)
        store_block(exp_avg_sq_ptr, exp_avg_sq, left, BLOCK, IS_FULL)
    store_block(grad_ptr, tl.zeros([BLOCK], tl.float32), left, BLOCK, IS_FULL)
    if not IS_FULL:
        # Beyond the lane's end nothing was loaded, but 0 / (0 + eps) is a number only if eps is above 0.
        params = tl.where(tl.arange(0, BLOCK) < left, params, 0.0)
    # Sizes of floats order as their bits do, with NaN above all, and the order of a maximum does not matter.
    sizes = tl.abs(params).to(tl.int32, bitcast=True)
    tl.atomic_max(largest_ptr + lane // SIDES, tl.max(sizes, 0), sem="relaxed")


@jit
def _update_kernel(  # type: ignore[no-untyped-def]
    lanes_ptr,
    numbers_ptr,
    factors_ptr,
    largest_ptr,
    num_lanes,
    SIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    lane, start, left = find_block(lanes_ptr, num_lanes, BLOCK, LANES)
    if left >= BLOCK:
        _update_block(lanes_ptr, numbers_ptr, factors_ptr, largest_ptr, lane, start, left, SIDES, BLOCK, True)
    else:
        _update_block(lanes_ptr, numbers_ptr, factors_ptr, largest_ptr, lane, start, left, SIDES, BLOCK, False)


@dataclass(frozen=True, eq=False)
class StepTables:
    lanes: list[ParameterLane]
    lanes_L6: torch.Tensor
    numbers_L10: torch.Tensor
    norms_J: torch.Tensor
    factors_J: torch.Tensor
    largest_J: torch.Tensor
    sides: int
    num_blocks: int
    shared: dict[str, int]


def adamw_kernel(
    updates: Sequence[Update], finite_J: torch.Tensor, norms_J: torch.Tensor | None = None
) -> Callable[[], list[Updated]]:
    return step_by_kernel(updates, finite_J, _launch_update, norms_J)


def norm_kernel(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of a gradient in several buffers, with the bits of a step of all of them."""
    lanes = tuple(ParameterLane(grad, grad, grad, grad, 0.0) for grad in grads)
    norms: list[torch.Tensor] = []

    def keep_norm(tables: StepTables) -> None:
        norms.append(tables.norms_J[0].clone())

    update = Update(lanes, 1, (0.0, 0.0), 0.0, 0.0, 0.0, True)
    step_by_kernel([update], torch.ones(1, device=grads[0].device), keep_norm)
    return norms[0]


def adamw_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of one job's gradient, a value on the device with the bits that a step of the job computes. Stages pass
    it to the steps of their parts."""
    return norm_kernel(grads) if runs_triton(grads[0]) else norm_reference(grads)


def _launch_update(tables: StepTables) -> None:
    grid, lane_tables = (tables.num_blocks,), (tables.lanes_L6, tables.numbers_L10, tables.factors_J, tables.largest_J)
    _update_kernel[grid](*lane_tables, len(tables.lanes), tables.sides, **tables.shared)


def step_by_kernel(
    updates: Sequence[Update],
    finite_J: torch.Tensor,
    launch_update: Callable[[StepTables], None],
    known_J: torch.Tensor | None = None,
) -> Callable[[], list[Updated]]:
    """Computes norms and factors of all jobs, then runs an update kernel, then one read; `known_J`: known norms."""
    device = updates[0].lanes[0].params_P.device
    sides = max(2, *(len(update.lanes) for update in updates))
    filled = [(update, lane) for update in updates for lane in _filled_up(update.lanes, sides)]
    lanes = [lane for _, lane in filled]
    numbers = [_numbers(update, lane) for update, lane in filled]
    *firsts, num_blocks = itertools.accumulate((cdiv(lane.params_P.numel(), BLOCK) for lane in lanes), initial=0)
    table = [[*_addresses(lane), first] for lane, first in zip(lanes, firsts, strict=True)]
    lanes_L6 = sent(torch.tensor(table), device)
    numbers_L10 = sent(torch.tensor(numbers, dtype=torch.float32), device)
    sums = torch.empty(num_blocks, device=device)
    # Rows of whole vectors: a kernel is compiled again for tables that do not begin at multiples of 16 bytes.
    num_jobs = len(updates)
    results_3J = torch.zeros(3, cdiv(num_jobs, 4) * 4, device=device)
    arrival = AsyncCopy(results_3J)
    norms_J, largest_J, factors_J = results_3J[0], results_3J.view(torch.int32)[1], results_3J[2]
    shared = {"BLOCK": BLOCK, "LANES": max(FEWEST_LANES, next_power_of_2(len(lanes))), "num_warps": NUM_WARPS}
    is_known = known_J is not None
    if known_J is not None:
        norms_J[:num_jobs].copy_(known_J)
    else:
        _squares_kernel[(num_blocks,)](lanes_L6, sums, len(lanes), **shared)
    tables = (lanes_L6, numbers_L10, finite_J, sums, norms_J, factors_J)
    _norms_kernel[(num_jobs,)](*tables, sides, BLOCK, CHUNK, IS_KNOWN=is_known)
    launch_update(StepTables(lanes, lanes_L6, numbers_L10, norms_J, factors_J, largest_J, sides, num_blocks, shared))
    arrival.begin()
    return lambda: [Updated(norm, size, factor < 0) for norm, size, factor in arrival.get().t()[:num_jobs].tolist()]


def adamw(
    updates: Sequence[Update], finite_J: torch.Tensor | None = None, norms_J: torch.Tensor | None = None
) -> Callable[[], list[Updated]]:
    """Starts the steps of all jobs given, each as if alone; gradients are zero afterwards. `finite_J` holds on the
    device whether each loss is finite, where the host does not know yet; `norms_J` are the norms of gradients of which
    the buffers here are only parts. Returns a function that waits for the device and returns the results."""
    assert updates
    if finite_J is None:
        finite_J = torch.ones(len(updates), device=updates[0].lanes[0].params_P.device)
    for lane in (lane for update in updates for lane in update.lanes):
        for tensor in (lane.params_P, lane.grad_P, lane.exp_avg_P, lane.exp_avg_sq_P):
            assert tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.shape == lane.params_P.shape
    if runs_triton(finite_J):
        return adamw_kernel(updates, finite_J, norms_J)
    results = adamw_reference(updates, finite_J, norms_J=norms_J)
    return lambda: results


def _numbers(update: Update, lane: ParameterLane) -> tuple[float, ...]:
    """A row of the table of numbers, computed in double precision."""
    beta1, beta2 = update.betas
    return (
        1 - lane.rate * update.weight_decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lane.rate / (1 - beta1**update.number),
        math.sqrt(1 - beta2**update.number),
        update.eps,
        update.max_grad_norm,
        float(update.is_finite),
    )


def _filled_up(lanes: tuple[ParameterLane, ...], sides: int) -> list[ParameterLane]:
    """The lanes of a job, filled up with empty ones to the number in the tables."""
    return [*lanes, *[lanes[0].emptied()] * (sides - len(lanes))]


def _addresses(lane: ParameterLane) -> list[int]:
    tensors = (lane.params_P, lane.grad_P, lane.exp_avg_P, lane.exp_avg_sq_P)
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert all(address % 16 == 0 for address in addresses), "flat buffers begin at multiples of 16 bytes"
    return [*addresses, lane.params_P.numel()]
