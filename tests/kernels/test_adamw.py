"""One AdamW for all jobs that step together: what torch does to each of them alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.kernels import adamw as module
from weft.kernels.adamw import BLOCK, ParameterLane, Update, Updated, adamw, adamw_kernel, adamw_reference

Step = Callable[..., list[Updated]]
SETTINGS: list[dict[str, Any]] = [
    {"rates": (1e-3, 1e-3), "weight_decay": 0.0, "max_grad_norm": 1.0},
    {"rates": (2e-3, 3.2e-2), "weight_decay": 0.1, "max_grad_norm": 0.0},
    {"rates": (5e-2, 5e-2), "weight_decay": 0.3, "max_grad_norm": 1e6, "betas": (0.8, 0.95), "eps": 1e-4},
]
SIZES = [(1, 3), (BLOCK - 1, BLOCK), (BLOCK + 1, 2 * BLOCK + 70)]


def make(
    seed: int,
    sizes: tuple[int, int],
    *,
    rates: tuple[float, float] = (1e-3, 1e-3),
    number: int = 1,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    is_finite: bool = True,
) -> Update:
    """A job in the middle of its training, drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)

    def lane(size: int, rate: float) -> ParameterLane:
        params, grad, exp_avg, root = (torch.randn(size, generator=generator) for _ in range(4))
        return ParameterLane(params, grad, 0.1 * exp_avg * (number > 1), 0.01 * root.square() * (number > 1), rate)

    lanes = (lane(sizes[0], rates[0]), lane(sizes[1], rates[1]))
    return Update(lanes, number, betas, eps, weight_decay, max_grad_norm, is_finite)


def finite(updates: Sequence[Update], given: Sequence[bool] | None) -> torch.Tensor:
    return torch.ones(len(updates)) if given is None else torch.tensor(given, dtype=torch.float32)


def by_kernel(updates: Sequence[Update], given: Sequence[bool] | None = None) -> list[Updated]:
    return adamw_kernel(updates, finite(updates, given))()


def by_reference(updates: Sequence[Update], given: Sequence[bool] | None = None) -> list[Updated]:
    return adamw_reference(updates, finite(updates, given))


def tensors(update: Update) -> list[torch.Tensor]:
    return [t for lane in update.lanes for t in (lane.params_P, lane.exp_avg_P, lane.exp_avg_sq_P, lane.grad_P)]


def copied(update: Update) -> list[torch.Tensor]:
    return [t.clone() for t in tensors(update)]


def same_bits(mine: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(x.view(torch.int32).equal(y.view(torch.int32)) for x, y in zip(mine, others, strict=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=["clipped", "loraplus", "decayed"])
def test_reference_when_stepped_twenty_times_then_equals_torch(settings):
    """The reference is torch.optim.AdamW after clip_grad_norm_."""
    update = make(1, (70, 41), **settings)
    params = [torch.nn.Parameter(lane.params_P.clone()) for lane in update.lanes]
    groups = [{"params": [p], "lr": rate} for p, rate in zip(params, settings["rates"], strict=True)]
    optimizer = torch.optim.AdamW(
        groups, betas=update.betas, eps=update.eps, weight_decay=update.weight_decay, foreach=False
    )
    generator = torch.Generator().manual_seed(2)
    for number in range(1, 21):
        for lane, param in zip(update.lanes, params, strict=True):
            lane.grad_P.copy_(torch.randn(lane.grad_P.shape, generator=generator) * number)
            param.grad = lane.grad_P.clone()
        limit = update.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(params, limit, foreach=False)
        optimizer.step()
        (result,) = adamw([replace(update, number=number)])()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert not result.skipped
    for lane, param in zip(update.lanes, params, strict=True):
        assert (lane.params_P - param).norm() <= 1e-6 * param.norm()
        assert not lane.grad_P.any()
    assert result.largest == max(float(lane.params_P.abs().max()) for lane in update.lanes)


@pytest.mark.parametrize("number", [1, 7])
def test_kernel_when_jobs_of_any_size_step_then_equals_the_reference(number):
    jobs = [make(seed, sizes, number=number, **settings)
            for seed, (sizes, settings) in enumerate(zip(SIZES, SETTINGS, strict=True))]  # fmt: skip
    references = [make(seed, sizes, number=number, **settings)
             for seed, (sizes, settings) in enumerate(zip(SIZES, SETTINGS, strict=True))]  # fmt: skip
    results, expected = by_kernel(jobs), by_reference(references)
    for mine, other in zip(results, expected, strict=True):
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        assert mine.largest == pytest.approx(other.largest, rel=1e-6)
        assert mine.skipped is other.skipped is False
    for job, reference in zip(jobs, references, strict=True):
        for x, y in zip(tensors(job), tensors(reference), strict=True):
            assert (x - y).norm() <= 1e-6 * y.norm()


@pytest.mark.parametrize("counts", [(1,), (2, 1), (1, 2, 1), (3, 1, 2)])
def test_kernel_when_jobs_have_other_numbers_of_lanes_then_equals_the_reference(counts):
    """A method may have one group of parameters or many; two lanes have the bits they have among jobs like them."""

    def jobs() -> list[Update]:
        made = [make(seed, SIZES[2], number=3) for seed, _ in enumerate(counts)]
        return [
            replace(job, lanes=(*job.lanes, *make(9, (50, 1), number=3).lanes)[:n])
            for job, n in zip(made, counts, strict=True)
        ]

    mine, references, alone = jobs(), jobs(), jobs()
    for result, expected in zip(by_kernel(mine), by_reference(references), strict=True):
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
        assert result.largest == pytest.approx(expected.largest, rel=1e-6)
    for job, reference, single in zip(mine, references, alone, strict=True):
        for x, y in zip(tensors(job), tensors(reference), strict=True):
            assert (x - y).norm() <= 1e-6 * y.norm()
        by_kernel([single])
        assert same_bits(tensors(job), tensors(single))


def test_kernel_when_a_lane_has_more_blocks_than_a_chunk_then_all_count(monkeypatch):
    """The sums of many blocks are added in several chunks."""
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "CHUNK", 4)
    (result,) = by_kernel([make(3, (16 * 9 + 5, 40))])
    (expected,) = by_reference([make(3, (16 * 9 + 5, 40))])
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)


@pytest.mark.parametrize("step", [by_kernel, by_reference], ids=["kernel", "reference"])
def test_step_when_others_step_too_then_the_bits_are_those_of_the_job_alone(step: Step):
    """Neither more jobs, nor their order, nor a NaN in them changes mine."""
    alone = make(5, SIZES[2], number=3)
    (mine,) = step([alone])
    sick = make(6, SIZES[1], number=3)
    sick.lanes[0].grad_P.fill_(math.nan)
    sick.lanes[1].params_P.fill_(math.inf)
    together = make(5, SIZES[2], number=3)
    neighbours = [sick, make(7, (2, 2), number=900, rates=(9.0, 9.0), is_finite=False), make(8, (3 * BLOCK, 9))]
    results = step([*neighbours[:2], together, neighbours[2]])
    assert results[2] == mine
    assert [r.skipped for r in results] == [True, True, False, False]
    assert same_bits(tensors(together), tensors(alone))


@pytest.mark.parametrize("step", [by_kernel, by_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("cause", ["nan gradient", "infinite gradient", "loss", "loss on the device"])
def test_step_when_something_is_not_finite_then_weights_and_moments_stay(step: Step, cause):
    value = math.nan if "nan" in cause else math.inf
    update = make(9, (BLOCK + 2, 5), number=2, is_finite=cause != "loss")
    if "gradient" in cause:
        update.lanes[0].grad_P[BLOCK + 1] = value
    before = copied(update)
    (result,) = step([update], [cause != "loss on the device"])
    assert result.skipped
    assert math.isfinite(result.grad_norm) == ("loss" in cause)
    assert same_bits(tensors(update)[0:3] + tensors(update)[4:7], before[0:3] + before[4:7])
    assert not any(lane.grad_P.any() for lane in update.lanes)
    assert result.largest == max(float(lane.params_P.abs().max()) for lane in update.lanes)


@pytest.mark.parametrize("step", [by_kernel, by_reference], ids=["kernel", "reference"])
def test_step_when_a_moment_is_nan_then_the_largest_weight_reports_it(step: Step):
    """What no gradient shows must still be found: a NaN is larger than any weight."""
    update = make(10, (BLOCK + 2, 5), number=2)
    update.lanes[1].exp_avg_P[3] = math.nan
    (result,) = step([update])
    assert not result.skipped and math.isnan(result.largest)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, about what the kernel then throws away
def test_kernel_when_eps_is_zero_then_the_end_of_a_lane_makes_no_nan():
    update = make(11, (5, BLOCK + 3), number=2, eps=0.0)
    (result,) = by_kernel([update])
    assert math.isfinite(result.largest)


def test_adamw_when_a_buffer_is_not_flat_float32_then_refused():
    update = make(12, (6, 6))
    lane = update.lanes[0]
    with pytest.raises(AssertionError):
        adamw([replace(update, lanes=(replace(lane, grad_P=lane.grad_P.double()), update.lanes[1]))])


def test_kernel_when_there_is_no_room_for_the_results_then_nothing_has_been_stepped(monkeypatch):
    """A repeated attempt must not step twice."""
    update = make(13, (BLOCK + 2, 5), number=2)
    before = copied(update)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no pinned memory")

    monkeypatch.setattr(module, "AsyncCopy", full)
    with pytest.raises(torch.OutOfMemoryError):
        by_kernel([update])
    assert same_bits(tensors(update), before)
