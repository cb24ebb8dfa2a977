"""A run's forecast: counts, time and memory agree with the plan they come from."""

from __future__ import annotations

import pytest

from weft.cost.analytic import AnalyticCost
from weft.cost.hardware import find_hardware
from weft.cost.shape import ModelShape
from weft.plan.pack import pack
from weft.plan.types import Batch, JobQueue
from weft.simulate.forecast import JobOutline, forecast

SHAPE = ModelShape("small", 64, 128, 4, 4, 2, 16, 500)


def outline(name: str, num_batches: int, lengths: tuple[int, ...], rank: int = 8) -> JobOutline:
    batches = tuple(Batch(step, 0, lengths) for step in range(num_batches))
    queue = JobQueue(name, batches, True)
    return JobOutline(queue, num_batches, num_batches * sum(lengths), rank)


def cost(num_stages: int = 1) -> AnalyticCost:
    return AnalyticCost(SHAPE, find_hardware("h200"), num_stages, rank=8, num_jobs=2)


def test_forecast_when_on_one_stage_then_counts_what_the_planner_planned():
    jobs = [outline("a", 4, (30, 40)), outline("b", 2, (50,))]
    found, timeline = forecast(jobs, 100, cost(), pack)
    assert found.planned_tokens == found.total_tokens == 4 * 70 + 2 * 50
    assert found.num_microbatches >= found.fewest_microbatches == 4
    assert found.fill == pytest.approx(found.planned_tokens / (found.num_microbatches * 100))
    assert found.planned_s == found.total_s == timeline.makespan_s
    assert found.keeps_order and found.fits and found.groups == (("a", "b"),)


def test_forecast_when_only_a_part_is_planned_then_the_rest_goes_on_at_its_rate():
    job = outline("a", 4, (30, 40))
    whole = JobOutline(job.queue, 40, 10 * job.num_tokens, job.rank)
    found, _ = forecast([whole], 100, cost(), pack)
    assert found.total_s == pytest.approx(10 * found.planned_s)


def test_forecast_when_in_stages_then_names_memory_of_each_and_groups():
    jobs = [outline(name, 4, (30, 40, 20)) for name in "abcd"]
    found, timeline = forecast(jobs, 100, cost(2), pack)
    assert timeline.num_stages == found.num_stages == len(found.stage_bytes) == 2
    assert sorted(name for group in found.groups for name in group) == ["a", "b", "c", "d"]
    assert 0 <= found.bubble_ratio < 1
    assert found.to_json()["fits"] is True


def test_forecast_when_the_model_is_too_large_then_says_that_it_does_not_fit():
    large = ModelShape("large", 8192, 28672, 80, 64, 8, 128, 128256)
    found, _ = forecast([outline("a", 1, (30,))], 100, AnalyticCost(large, find_hardware("a100-40")), pack)
    assert not found.fits
