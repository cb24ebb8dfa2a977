"""AdamW with moments of 8 bits: how far it is from AdamW, and what it shares with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.kernels.adamw import BLOCK, ParameterLane, Update, adamw_reference, step_plain_lane
from weft.kernels.adamw_8bit import (
    ROOT_DECADES,
    SCALED,
    SIGNED_DECADES,
    QuantisedLane,
    adamw_8bit,
    adamw_8bit_kernel,
    adamw_8bit_reference,
    dequantise,
    levels,
    quantise,
)


def lane(params_P: torch.Tensor, grad_P: torch.Tensor, rate: float) -> QuantisedLane:
    size, num_scales = params_P.numel(), -(-params_P.numel() // SCALED)
    codes = torch.zeros(size, dtype=torch.int8), torch.zeros(size, dtype=torch.uint8)
    return QuantisedLane(params_P, grad_P, *codes, rate, torch.zeros(num_scales), torch.zeros(num_scales))


def make(seed: int, sizes: tuple[int, ...] = (BLOCK + 70, 41), **settings: Any) -> Update:
    generator = torch.Generator().manual_seed(seed)
    lanes = tuple(lane(*(torch.randn(size, generator=generator) for _ in range(2)), 1e-2) for size in sizes)
    given: dict[str, Any] = {"number": 1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return Update(lanes, **{**given, "max_grad_norm": 1.0, "is_finite": True, **settings})


def drawn(update: Update, seed: int, num_decades: int = 3) -> Update:
    """The same job before its next step, with other gradients of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    for own in update.lanes:
        scale = 10.0 ** (-num_decades * torch.rand(own.grad_P.shape, generator=torch.Generator().manual_seed(7)))
        own.grad_P.copy_(torch.randn(own.grad_P.shape, generator=generator) * scale)
    return replace(update, number=seed)


def tensors(update: Update) -> list[torch.Tensor]:
    return [
        tensor
        for own in update.lanes
        if isinstance(own, QuantisedLane)
        for tensor in (own.params_P, own.exp_avg_P, own.exp_avg_scales, own.exp_avg_sq_P, own.root_scales)
    ]


@pytest.mark.parametrize("decades", [SIGNED_DECADES, ROOT_DECADES])
def test_codes_when_levels_are_quantised_then_come_back_as_they_are(decades):
    """Every level is its own nearest, and there is one for each code."""
    shares = levels(decades)
    assert len(shares) == 2**decades and shares[-1] == 1 and bool((shares.diff() > 0).all())
    codes, scales = quantise(shares[-SCALED:], decades)
    assert codes.tolist() == list(range(len(shares)))[-SCALED:] and scales.tolist() == [1.0]


@pytest.mark.parametrize("decades", [SIGNED_DECADES, ROOT_DECADES])
def test_quantise_when_numbers_are_of_any_size_then_the_nearest_level_is_taken(decades):
    """No other level is nearer, the largest of each block is kept to the bit, and only zero becomes a root of zero."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3 * SCALED + 5, generator=generator) * 10.0 ** (-9 * torch.rand(773, generator=generator))
    values[7] = 0.0
    values = values.abs() if decades == ROOT_DECADES else values
    codes, scales = quantise(values, decades)
    back = dequantise(codes, scales, decades)
    for first in range(0, len(values), SCALED):
        own, found, scale = values[first : first + SCALED], back[first : first + SCALED], scales[first // SCALED]
        assert scale == own.abs().max() and found[own.abs().argmax()].abs() == scale
        nearest = (own.abs().unsqueeze(1) / scale - levels(decades)).abs().amin(dim=1)
        error = (own.abs() / scale - found.abs() / scale).abs()
        is_tiny = own.abs() / scale < 10.0 ** (1 - decades)
        assert bool(((error - nearest).abs() <= 1e-7)[~is_tiny].all())
    assert back[7] == 0 and bool((back.sign() == values.sign())[codes != 0].all())
    assert decades == SIGNED_DECADES or bool((back > 0).equal(values > 0))


def published_map(*, is_signed: bool) -> torch.Tensor:
    """The levels of the paper: centres of the cells of seven decades, zero and one."""
    found = [0.0, 1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (decade + (not is_signed)) + 1, dtype=torch.float64)
        centres = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += [*centres, *(-centre for centre in centres if is_signed)]
    return torch.tensor(sorted(found), dtype=torch.float32)


def rounded(values: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % SCALED)).view(-1, SCALED)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    nearest = torch.bucketize(blocks / scales.clamp(min=1e-38), (shares[1:] + shares[:-1]) / 2)
    return (shares[nearest] * scales).view(-1)[: values.numel()]


def published_step(update: Update, own: ParameterLane, factor: float) -> None:
    step_plain_lane(update, own, factor)
    own.exp_avg_P.copy_(rounded(own.exp_avg_P, published_map(is_signed=True)))
    own.exp_avg_sq_P.copy_(rounded(own.exp_avg_sq_P, published_map(is_signed=False)))


@pytest.mark.parametrize(("num_decades", "bound"), [(0, 0.02), (1, 0.04), (3, 0.08)])
def test_reference_when_stepped_many_times_then_is_near_adamw_and_no_further_than_the_published_way(num_decades, bound):
    """By how much weights have moved otherwise after 40 steps on gradients of so many decades."""

    def plain() -> Update:
        zeros = [torch.zeros_like(own.grad_P) for own in make(1).lanes]
        lanes = [
            ParameterLane(own.params_P, own.grad_P, zero, zero.clone(), 1e-2)
            for own, zero in zip(make(1).lanes, zeros, strict=True)
        ]
        return replace(make(1), lanes=tuple(lanes))

    mine, exact, published = make(1), plain(), plain()
    before = [own.params_P.clone() for own in mine.lanes]
    for step in range(1, 41):
        mine, exact, published = (drawn(update, step, num_decades) for update in (mine, exact, published))
        adamw_8bit_reference([mine], torch.ones(1))
        adamw_reference([exact], torch.ones(1))
        adamw_reference([published], torch.ones(1), published_step)
    for own, other, theirs, start in zip(mine.lanes, exact.lanes, published.lanes, before, strict=True):
        moved = (other.params_P - start).norm()
        error = (own.params_P - other.params_P).norm() / moved
        assert error <= bound and error <= 1.5 * (theirs.params_P - other.params_P).norm() / moved


def test_reference_when_a_gradient_vanishes_then_its_weight_is_not_thrown_far():
    """A second moment that a code cannot hold would be taken for zero, and the weight stepped by m / eps."""
    update = make(2, (SCALED,), max_grad_norm=0.0, weight_decay=0.0)
    own = update.lanes[0]
    start = own.params_P.clone()
    own.grad_P[:] = torch.logspace(0, -6, SCALED)
    for step in range(1, 6):
        adamw_8bit([replace(update, number=step)])()
    assert (own.params_P - start).abs().max() <= 5 * 1e-2 * 1.5


@pytest.mark.parametrize("sizes", [(1, 3), (BLOCK - 1, BLOCK), (BLOCK + 1, 2 * BLOCK + 70)])
def test_kernel_when_jobs_step_then_equals_the_reference(sizes):
    """Weights and scales at 1e-6; a code may be the neighbour's where a number lies between two."""
    mine, reference = make(3, sizes), make(3, sizes)
    for step in range(1, 4):
        mine, reference = drawn(mine, step), drawn(reference, step)
        (result,), (expected,) = (
            adamw_8bit_kernel([mine], torch.ones(1))(),
            adamw_8bit_reference([reference], torch.ones(1)),
        )
        assert (result.grad_norm, result.largest) == pytest.approx((expected.grad_norm, expected.largest), rel=1e-5)
        assert not any(own.grad_P.any() for own in mine.lanes)
    for x, y in zip(tensors(mine), tensors(reference), strict=True):
        if x.dtype is torch.float32:
            assert (x - y).norm() <= 1e-5 * y.norm()
        else:
            assert (x.int() - y.int()).abs().max() <= 1 and (x != y).float().mean() < 0.01


@pytest.mark.parametrize("by_kernel", [True, False])
def test_step_when_others_step_too_then_the_bits_are_those_of_the_job_alone(by_kernel):
    """Neither more jobs nor a NaN in them changes mine, and what is not finite changes nothing of its own."""
    step = (lambda *given: adamw_8bit_kernel(*given)()) if by_kernel else adamw_8bit_reference
    alone, mine = drawn(make(4), 1), drawn(make(4), 1)
    sick, left_out = make(5, (700,)), make(6, (30, 40, 50), is_finite=False)
    sick.lanes[0].grad_P[3] = math.nan
    before = [tensor.clone() for tensor in (*tensors(sick), *tensors(left_out))]
    results = step([sick, mine, left_out], torch.ones(3))
    assert [result.skipped for result in results] == [True, False, True]
    assert results[1] == step([alone], torch.ones(1))[0]
    assert all(x.equal(y) for x, y in zip(tensors(mine), tensors(alone), strict=True))
    assert all(x.equal(y) for x, y in zip((*tensors(sick), *tensors(left_out)), before, strict=True))


def test_adamw_8bit_when_a_lane_has_plain_moments_then_refused():
    update = make(7, (5,))
    own = update.lanes[0]
    plain = ParameterLane(own.params_P, own.grad_P, own.grad_P.clone(), own.grad_P.clone(), 1e-3)
    with pytest.raises(AssertionError):
        adamw_8bit([replace(update, lanes=(plain,))])
