"""A run's forecast: counts, time and memory agree with the plan they come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from weft.plan.check import violations
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.fit import MicrobatchLoad
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.memory import StateBytes
from weft.plan.cost.profile import Measurement, Profile, ProfiledCost, Setup, fit_profile
from weft.plan.cost.shape import ModelShape
from weft.plan.pack import pack
from weft.plan.simulate.choose import pipeline_planner
from weft.plan.simulate.forecast import Forecast, JobOutline, forecast
from weft.plan.types import Batch, JobQueue

SHAPE = ModelShape("small", 64, 128, 4, 4, 2, 16, 500)
TWO = StateBytes(2.0, 0.0)


def planned(
    jobs: Sequence[JobOutline], capacity: int, cost: AnalyticCost, measured: ProfiledCost | None = None
) -> Forecast:
    """By the planner that a run has."""
    planner = pack if cost.num_stages == 1 else pipeline_planner("auto", cost)
    return forecast(jobs, capacity, cost, planner, measured)


def outline(name: str, num_batches: int, lengths: tuple[int, ...], rank: int = 8) -> JobOutline:
    batches = tuple(Batch(step, 0, lengths) for step in range(num_batches))
    queue = JobQueue(name, batches, True)
    return JobOutline(queue, num_batches, num_batches * sum(lengths), rank)


def cost(num_stages: int = 1) -> AnalyticCost:
    return AnalyticCost(SHAPE, find_hardware("h200"), num_stages, rank=8, num_jobs=2)


def test_forecast_when_on_one_stage_then_counts_what_the_planner_planned():
    jobs = [outline("a", 4, (30, 40)), outline("b", 2, (50,))]
    found = planned(jobs, 100, cost())
    assert found.planned_tokens == found.total_tokens == 4 * 70 + 2 * 50
    assert found.num_microbatches >= found.fewest_microbatches == 4
    assert found.fill == pytest.approx(found.planned_tokens / (found.num_microbatches * 100))
    assert found.planned_s == found.timeline.makespan_s
    assert found.total_s == pytest.approx(found.planned_s) and 4 * found.round_s == pytest.approx(found.planned_s)
    assert found.keeps_order and found.fits
    assert found.largest_capacity > 100


@pytest.mark.parametrize("num_stages", [1, 2])
def test_forecast_when_a_job_keeps_less_than_adamw_then_so_much_less_memory_is_taken(num_stages):
    """Six bytes of each of its weights, on whatever stage they are."""
    usual = [outline("a", 2, (30, 40), rank=8), outline("b", 2, (50,), rank=4)]
    lean = [replace(usual[0], state=TWO), usual[1]]
    found = [planned(jobs, 100, cost(num_stages)).stage_bytes for jobs in (usual, lean)]
    assert sum(found[0]) - sum(found[1]) == 6 * SHAPE.adapter_parameters(8)


def test_forecast_when_a_job_trains_rows_of_its_own_then_they_take_memory():
    """Weight, gradient, the step's own copy and two bytes of moments each."""
    usual = [outline("a", 2, (30, 40), rank=8)]
    rows = [replace(usual[0], state=TWO, num_trained_rows=7)]
    lean = [replace(usual[0], state=TWO)]
    with_rows, without = (planned(jobs, 100, cost()) for jobs in (rows, lean))
    expected = 7 * SHAPE.hidden * (cost().memory.trained_bytes_each + 2)
    assert (with_rows.trained_rows_bytes, without.trained_rows_bytes) == (expected, 0)
    assert with_rows.stage_bytes[0] - without.stage_bytes[0] == expected


def test_forecast_when_jobs_share_no_microbatch_then_they_are_in_different_groups():
    """30 + 40 leaves room for 20 but not for 90; through the 20 two jobs meet, the third stays alone."""
    jobs = [outline("a", 2, (30, 40)), outline("b", 2, (20,)), outline("c", 2, (95,))]
    found = planned(jobs, 100, cost())
    assert found.groups == (("a", "b"), ("c",))
    assert [found.group_of(name) for name in "abc"] == [1, 1, 2]


def test_forecast_when_only_a_part_is_planned_then_the_rest_goes_on_at_its_rate():
    job = outline("a", 4, (30, 40))
    whole = JobOutline(job.queue, 40, 10 * job.num_tokens, job.cost_rank)
    found = planned([whole], 100, cost())
    assert found.total_s == pytest.approx(10 * found.planned_s)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_forecast_when_jobs_are_evaluated_then_the_whole_run_takes_the_forward_passes_too(num_stages):
    job = outline("a", 4, (50, 50))
    found, without = (planned([replace(job, forward_tokens=n)], 100, cost(num_stages)) for n in (1000, 0))
    slowest = max(cost(num_stages).forward_s([50, 50], stage) for stage in range(num_stages))
    assert found.total_s - without.total_s == pytest.approx(10 * slowest) and without.eval_s == 0
    assert found.planned_s == without.planned_s


def test_forecast_when_in_stages_then_names_memory_of_each_and_groups():
    jobs = [outline(name, 4, (30, 40, 20)) for name in "abcd"]
    found = planned(jobs, 100, cost(2))
    assert found.timeline.num_stages == found.num_stages == len(found.stage_bytes) == 2
    assert found.stage_layers == (2, 2)
    assert sorted(name for group in found.groups for name in group) == ["a", "b", "c", "d"]
    assert 0 <= found.bubble_ratio < 1
    assert violations(found.program) == []


def test_forecast_when_the_model_is_too_large_then_reports_that_it_does_not_fit():
    large = ModelShape("large", 8192, 28672, 80, 64, 8, 128, 128256)
    for num_stages in (1, 2):
        device = AnalyticCost(large, find_hardware("a100-40"), num_stages)
        found = planned([outline("a", 1, (30,))], 100, device)
        assert not found.fits and found.largest_capacity == 0


def test_forecast_when_it_becomes_json_then_all_of_it_is_plain_and_there():
    jobs = [replace(outline("a", 4, (30, 40)), rank=7), outline("b", 2, (50,), rank=4)]
    for num_stages in (1, 2):
        found = planned(jobs, 100, cost(num_stages))
        tree = json.loads(json.dumps(found.to_json()))
        assert [job["name"] for job in tree["jobs"]] == ["a", "b"] and [job["rank"] for job in tree["jobs"]] == [
            7,
            None,
        ]
        for name in ("capacity", "fill", "total_s", "tokens_per_s", "bubble_ratio", "device_bytes", "keeps_order"):
            assert tree[name] == getattr(found, name)
        assert len(tree["program"]["stages"]) == num_stages
        assert sum(bool(segments) for segments in tree["program"]["microbatches"]) == found.num_microbatches
        assert len(tree["timeline"]) == len(found.timeline.spans)


def profile() -> Profile:
    """Of a device on which every row takes 1 µs each way and 1,000 bytes; reserved memory is 1 % off at times."""
    setup = Setup("NVIDIA H200", "small", 64, 4, SHAPE.layer_weights, SHAPE.head_weights, 100, 2, 1)
    measurements = []
    for index in range(16):
        load = MicrobatchLoad.of([(8, [10 + 7 * index] * (1 + index % 3))], 1000 * (index % 4), 1)
        memory = 1e6 + 1e3 * load.rows
        off = 1.01 if index % 4 == 3 else 1.0
        row = Measurement(load, 1e-6 * load.rows, 1e-6 * load.rows, 1e-5, memory, off * memory, index % 4 == 3)
        measurements.append(row)
    return fit_profile(setup, measurements)


def test_forecast_when_a_profile_is_given_then_time_and_memory_are_its_own():
    known = profile()
    measured = ProfiledCost(known, rank=8, num_jobs=2)
    jobs = [outline("a", 1, (100, 300)), outline("b", 1, (200,))]
    found = planned(jobs, 600, cost(), measured)
    assert found.planned_s == pytest.approx(2 * 600e-6 + 2 * measured.step_s(0), rel=1e-3)
    assert known.margin == pytest.approx(0.01, rel=0.05)
    assert found.stage_bytes[0] == pytest.approx((1e6 + 600e3) * (1 + known.margin), rel=1e-3)
    assert found.stage_bytes[0] != planned(jobs, 600, cost()).stage_bytes[0]
