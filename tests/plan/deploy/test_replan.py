"""A cluster changes its replicas when that pays, and never for nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.cost.padded import PaddedTime
from weft.errors import PlanError
from weft.plan.bucket import choose_buckets
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.replan import MoveCost, replan
from weft.plan.dispatch import ReplicaLayout, ReplicaTime

LAYOUTS = {1: 512, 2: 1024, 4: 2048}
"""Tokens that replicas of so many GPUs hold."""


def kinds() -> tuple[ReplicaKind, ...]:
    """The more GPUs a replica has, the slower each is."""
    found = []
    for size, most in LAYOUTS.items():
        slow = (1 + 0.4 * np.log2(size)) / size
        found.append(
            ReplicaKind(ReplicaTime(ReplicaLayout(size, 1), most, PaddedTime((0, 0, 1e-4 * slow, 0, 0, 0)), 8))
        )
    return tuple(found)


def problem(longest: int, seed: int = 0, count: int = 80) -> DeployProblem:
    rng = np.random.default_rng(seed)
    lengths = [*np.clip(rng.lognormal(5, 0.8, count), 16, longest).astype(int).tolist(), longest]
    return DeployProblem(kinds(), {"gpus": 8}, choose_buckets(lengths, 4))


def test_replan_when_the_jobs_are_the_same_then_keeps_every_replica():
    planned = plan_deployment(problem(500))
    found = replan(planned.replicas, problem(500), 10_000, MoveCost(0.0, 0.0))
    assert not found.moves and not found.started and not found.stopped and "still the best plan" in found.reason


def test_replan_when_a_longer_job_arrives_then_moves_whatever_it_costs():
    """Only the replicas that are missing are started."""
    small = plan_deployment(problem(500)).replicas
    found = replan(small, problem(2000), 1, MoveCost(1e6, 1e6))
    assert found.moves and found.now_s is None and found.gain_s is None
    assert {kind.num_gpus for kind in found.started} >= {4} and "fit on no replica there is" in found.reason
    kept = len(small) - len(found.stopped)
    assert kept + len(found.started) == len(found.planned.replicas)


@pytest.mark.parametrize(("cost_s", "moves"), [(0.99, True), (1.01, False)])
def test_replan_when_the_long_job_leaves_then_moves_only_if_the_steps_left_pay_for_it(cost_s, moves):
    large = plan_deployment(problem(2000)).replicas
    steps = 100
    free = replan(large, problem(500), steps, MoveCost(0.0, 0.0))
    assert free.gain_s is not None and free.gain_s > 0 and free.started
    cost = MoveCost(0.4 * cost_s * free.gain_s, 0.6 * cost_s * free.gain_s)
    found = replan(large, problem(500), steps, cost)
    assert found.moves is moves and f"{steps} steps" in found.reason


def test_replan_when_nothing_is_started_then_no_backbone_is_loaded():
    """A replica too many is only stopped."""
    planned = plan_deployment(problem(500)).replicas
    found = replan([*planned, kinds()[2]], problem(500), 1, MoveCost(2.0, 50.0))
    assert found.move_s == 2.0 and not found.started and [kind.num_gpus for kind in found.stopped] == [4]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.sampled_from([300, 900, 2000]), st.sampled_from([300, 900, 2000]))
def test_replan_when_jobs_change_in_any_way_then_what_it_does_takes_no_longer_than_what_it_does_not(a, b, then, now):
    """By its own prediction; and it ends with replicas that hold every sample."""
    before = plan_deployment(problem(then, a, 30)).replicas
    found = replan(before, problem(now, b, 30), 50, MoveCost(0.05, 0.1))
    moved_s = found.move_s + 50 * found.planned.step_s
    if found.now_s is None:
        assert found.moves
    elif found.moves:
        assert moved_s < 50 * found.now_s
    else:
        assert moved_s >= 50 * found.now_s or not (found.started or found.stopped)
    used = found.planned.replicas if found.moves else before
    assert max(kind.model.most_tokens for kind in used) >= now


def test_replan_when_the_question_makes_no_sense_then_refused():
    with pytest.raises(PlanError, match="0 or more"):
        MoveCost(-1.0, 0.0)
    with pytest.raises(PlanError, match="0 or more"):
        replan(kinds(), problem(500), -1, MoveCost(0.0, 0.0))
