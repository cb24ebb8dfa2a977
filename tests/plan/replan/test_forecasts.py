"""Forecasts prefer what suits the jobs that are left, and know that a job with ordered sums has one home."""

from __future__ import annotations

import numpy as np
import pytest

from weft.errors import PlanError
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.fit import PaddedTime
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.deploy import ReplicaKind
from weft.plan.deploy.buckets import ReplicaTime
from weft.plan.layout import ReplicaLayout, parse_layout
from weft.plan.replan import ClusterForecaster, DeviceForecaster, RemainingJob

HOLDS = {1: 512, 2: 1024}
"""Tokens that replicas of so many stages hold."""
ONE, EVENNESS_WEIGHTS = parse_layout("stages:1"), parse_layout("stages:1+stages:2")


def kinds(*_: object) -> list[ReplicaKind]:
    """The more stages, the slower each device."""
    time = PaddedTime((0, 0, 1e-4, 0, 0, 0))
    return [ReplicaKind(ReplicaTime(ReplicaLayout(stages=size), most, time, 8), "cpu") for size, most in HOLDS.items()]


def job(name: str, longest: int, steps: int, *, is_any_order: bool = True) -> RemainingJob:
    lengths = np.random.default_rng(0).integers(16, longest, 40).tolist()
    return RemainingJob(name, 8, (*lengths, longest), 8, steps, is_any_order)


CLUSTER = ClusterForecaster({"cpu": 3}, kinds)


def test_cluster_when_the_long_job_ends_then_small_replicas_are_best_for_those_left():
    long, short = job("long", 1000, 5), job("short", 100, 100)
    both = CLUSTER([long, short], EVENNESS_WEIGHTS)
    assert any(replica.stages == 2 for replica in both.planned.layout.replicas) and both.longest == 1000
    left = CLUSTER([short], both.planned.layout)
    assert str(left.planned.layout) == "spread:3"
    assert left.now is not None and left.planned.left_s < left.now.left_s
    assert left.planned.left_s == pytest.approx(100 * left.planned.step_s)


def test_cluster_when_a_long_job_arrives_then_the_small_replicas_are_reported_not_to_hold_it():
    found = CLUSTER([job("long", 1000, 5)], parse_layout("spread:3"))
    assert found.now is None and any(replica.stages == 2 for replica in found.planned.layout.replicas)


def test_cluster_when_the_job_left_has_ordered_sums_then_replicas_beside_its_home_save_nothing():
    """Shared out, its samples would take a third of the time; but they cannot be."""
    free, ordered = (
        CLUSTER([job("a", 100, 10, is_any_order=free)], parse_layout("spread:3")) for free in (True, False)
    )
    assert free.now is not None and ordered.now is not None and ordered.now.step_s > 1.5 * free.now.step_s
    assert len(ordered.planned.layout.replicas) == 1


def test_cluster_when_a_replica_no_longer_fits_then_the_layout_of_now_cannot_be():
    forecaster = ClusterForecaster({"cpu": 3}, lambda jobs: kinds()[1:])
    assert forecaster([job("a", 100, 10)], ONE).now is None


def test_cluster_when_no_layout_holds_a_sample_then_refused():
    with pytest.raises(PlanError, match="largest replica"):
        CLUSTER([job("huge", 5000, 1)], ONE)


SHAPE = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict(), "llama-3.1-8b")


def test_devices_when_jobs_end_then_the_layout_goes_from_shared_replicas_to_stages():
    """Eight jobs fill four replicas; one job with ordered sums has one home, and its microbatches fill stages."""
    forecaster = DeviceForecaster(lambda jobs: AnalyticCost(SHAPE, find_hardware("h100")), 8192, 4, 10_000 * 2**30)
    jobs = [RemainingJob(f"job{n}", 400, (1000,), 16, 10 + n) for n in range(8)]
    many = forecaster(jobs, ONE)
    assert str(many.planned.layout) == "spread:4" and many.now is not None
    assert many.now.left_s > 1.5 * many.planned.left_s and many.step_tokens == 8 * 400_000
    one = forecaster(jobs[-1:], many.planned.layout)
    assert str(one.planned.layout).startswith("stages:") and one.now is not None
    assert one.now.left_s == pytest.approx(17 * one.now.step_s)


def test_devices_when_a_layout_is_none_of_theirs_then_it_cannot_be():
    forecaster = DeviceForecaster(lambda jobs: AnalyticCost(SHAPE, find_hardware("h100")), 8192, 4, 10_000 * 2**30)
    assert forecaster([RemainingJob("a", 8, (100,), 16, 1)], EVENNESS_WEIGHTS).now is None
