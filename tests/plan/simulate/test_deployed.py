"""Steps of deployments on predicted seconds."""

from __future__ import annotations

import pytest

from weft.plan.cost.fit import PaddedTime
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.buckets import ReplicaTime
from weft.plan.deploy.dispatch import dispatch_evenly
from weft.plan.deploy.planner import plan_each
from weft.plan.deploy.types import DeployJob, KnownLengths, expected_batch
from weft.plan.layout import ReplicaLayout
from weft.plan.simulate.deploy_forecast import forecast_deployment, in_turn_step_s, mean_step_s

ONE = ReplicaTime(ReplicaLayout(), 512, PaddedTime((0, 0, 1e-3, 0, 0, 0)), 1)
"""A millisecond a token."""
JOBS = [DeployJob("a", 4, KnownLengths((64,) * 99 + (512,))), DeployJob("b", 2, KnownLengths((128,)))]


def test_mean_step_when_buckets_are_fixed_then_padding_counts():
    assert mean_step_s([ONE], [[60, 60], [100]]) == pytest.approx((0.128 + 0.128) / 2)
    assert mean_step_s([ONE], [[60, 60], [100]], bounds=[512]) == pytest.approx((1.024 + 0.512) / 2)


def test_in_turn_step_when_a_bucket_is_rare_then_it_counts_as_often_as_it_comes():
    """A plan's own batch has one of the rare long samples in every step; drawn batches hardly ever do."""
    plans = plan_each([ReplicaKind(ONE)], {"gpus": 1}, JOBS, are_alike=True)
    assert plans[0].step_s == pytest.approx(4 * 0.064 + 0.512)
    found = in_turn_step_s(plans, JOBS, 200, seed=1, share=dispatch_evenly)
    each = 4 * (0.99 * 0.064 + 0.01 * 0.512)
    assert found == pytest.approx(each + 2 * 0.128, rel=0.05)


def test_forecast_when_one_replica_is_all_there_is_then_no_way_saves_anything():
    """The same tokens on the same GPU take as long in any order."""
    found = forecast_deployment([ReplicaKind(ONE)], {"gpus": 1}, JOBS[1:])
    assert {round(choice.step_s, 9) for choice in found.choices} == {0.256}
    assert found.planned.gpu_seconds == pytest.approx(0.256) and found.deployment.is_complete


def test_forecast_when_the_expected_batch_has_what_hardly_ever_comes_then_no_other_way_is_faster_than_the_plan():
    """Its one long sample suits one large replica; what is drawn suits small ones, which are taken."""
    times = {size: PaddedTime((0, 0, 1e-3 / size**0.8, 0, 0, 0)) for size in (1, 2, 4)}
    kinds = [
        ReplicaKind(ReplicaTime(ReplicaLayout(tensor=size), 1024, time, 8, is_packed=True))
        for size, time in times.items()
    ]
    rare = KnownLengths((50,) * 60 + (1000,))
    jobs = [DeployJob(name, 2, rare) for name in ("a", "b")]
    assert str(plan_deployment(DeployProblem(tuple(kinds), {"gpus": 4}, expected_batch(jobs)))) == "tensor:4×1"
    found = forecast_deployment(kinds, {"gpus": 4}, jobs)
    steps = {choice.name: choice.step_s for choice in found.choices}
    assert str(found.deployment) == "stages:1×4" and steps["planned"] <= min(steps["by length"], steps["alike"])


def test_expected_batch_when_the_longest_was_not_drawn_then_it_is_in_it_all_the_same():
    job = DeployJob("rare", 1, KnownLengths((64,) * 100_000 + (500,)))
    assert expected_batch([job]).bounds[-1] == 512
    assert DeployProblem((ReplicaKind(ONE),), {"gpus": 1}, expected_batch([job])).num_gpus == 1
