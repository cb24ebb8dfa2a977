"""Deployment plans."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.deploy.published import figure_4
from weft.errors import PlanError
from weft.plan.cost.fit import PaddedTime
from weft.plan.deploy import Deployment, DeployProblem, ReplicaKind, plan_deployment, planner
from weft.plan.deploy.buckets import ReplicaTime, choose_buckets
from weft.plan.deploy.dispatch import dispatch, relax
from weft.plan.deploy.fleet import Fleet
from weft.plan.deploy.kinds import possible_layouts, without_dominated
from weft.plan.deploy.planner import plan_alike
from weft.plan.deploy.plans import PlanBounds, alike_counts, all_plans, num_plans, relaxed_plan
from weft.plan.deploy.types import DeployJob, KnownLengths, LengthSpread, draw_batches, expected_batch
from weft.plan.layout import ReplicaLayout, parse_layout


def drawn_problem(seed: int, num_gpus: int = 16) -> DeployProblem:
    """Five kinds of made-up speeds, two of them with stages, and a skewed batch."""
    rng = np.random.default_rng(seed)
    kinds = []
    for tensor_parallel, num_stages in ((1, 1), (2, 1), (1, 2), (4, 1), (8, 1)):
        slow = 1 + 0.25 * np.log2(tensor_parallel) * rng.uniform(0.5, 1.5)
        time = PaddedTime((2e-8 * slow / tensor_parallel, 0, 2e-4 * slow / tensor_parallel, 0, 0, 0.02 * slow))
        layout = ReplicaLayout(tensor=tensor_parallel, stages=num_stages)
        kinds.append(ReplicaKind(ReplicaTime(layout, 512 * tensor_parallel * num_stages, time, 8)))
    drawn = np.clip(rng.lognormal(5.5, 1.0, 150), 16, 4096)
    return DeployProblem(tuple(kinds), {"gpus": num_gpus}, choose_buckets(drawn.astype(int).tolist(), 6))


def step_of(problem: DeployProblem, plan: np.ndarray) -> float:
    return dispatch(Fleet(problem.models(plan), problem.buckets)).step_s


def holding_plans(problem: DeployProblem) -> np.ndarray:
    plans = all_plans(problem)
    most = [kind.model.most_tokens for kind in problem.kinds]
    longest = problem.buckets.bounds[-1]
    return plans[[max(m for m, count in zip(most, plan, strict=True) if count) >= longest for plan in plans]]


def test_plan_when_given_figure_4_then_finds_the_published_plan():
    found = plan_deployment(figure_4())
    assert found.counts == (4, 2, 0, 1) and str(found) == "stages:1×4, tensor:2×2, tensor:8×1"
    assert found.step_s == pytest.approx(14.829, abs=1e-3)
    assert found.is_complete and 0 < found.gap < 0.005, "whole samples cost a little over the relaxation"
    assert found.gpus_used == 16 and found.gpu_seconds == pytest.approx(16 * found.step_s)


def test_plan_when_handed_to_a_run_then_its_replicas_are_named_as_layouts_are():
    found = plan_deployment(drawn_problem(0))
    kinds = [
        ReplicaKind(ReplicaTime(ReplicaLayout(tensor=t, stages=p), 8, PaddedTime((0,) * 6), 8))
        for t, p in ((1, 1), (1, 2))
    ]
    problem = DeployProblem((*kinds, *found.problem.kinds), {"gpus": 4}, choose_buckets([8, 8], 1))
    unlike = Deployment(problem, (2, 1, *[0] * len(found.problem.kinds)), found.dispatch, 1.0, 1.0, 1)
    assert str(unlike.layout) == "spread:2+stages:2" and unlike.layout.num_devices == 4
    assert parse_layout(str(found.layout)) == found.layout
    assert found.layout.num_devices == found.gpus_used


def test_plan_when_replicas_of_figure_4_must_be_alike_then_two_large_ones():
    found = plan_alike(figure_4())
    assert found.counts == (0, 0, 0, 2) and found.step_s == pytest.approx(19.807, abs=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_plan_when_all_plans_are_tried_then_none_is_better(seed):
    """Of all kinds, on 16 GPUs, each with its own dispatch: neither the filter nor the bounds lose the best."""
    problem = drawn_problem(seed)
    plans = holding_plans(problem)
    best = min(step_of(problem, plan) for plan in plans)
    chosen = tuple(without_dominated(problem.kinds, problem.buckets))
    found = plan_deployment(DeployProblem(chosen, problem.pools, problem.buckets))
    assert found.step_s <= best * (1 + 1e-9) and found.is_complete
    assert found.bound_s <= found.step_s and found.gap < 0.1
    assert found.num_tried < num_plans(problem) / 4


@pytest.mark.parametrize("seed", range(3))
def test_bounds_when_sharpened_by_any_plan_then_stay_below_every_step(seed):
    problem = drawn_problem(seed)
    plans = holding_plans(problem)[::2]
    known = PlanBounds(problem, plans)
    steps = np.array([step_of(problem, plan) for plan in plans])
    before = known.bounds_P
    assert np.all(before <= steps * (1 + 1e-9))
    for plan in plans[::3]:
        known.learn(plan, relax(Fleet(problem.models(plan), problem.buckets)))
    assert np.all(known.bounds_P <= steps * (1 + 1e-9)) and known.bounds_P.sum() > before.sum()


@pytest.mark.parametrize("seed", range(3))
def test_bounds_when_only_better_steps_matter_then_stay_below_every_step_that_is_better(seed):
    """Pipelines that take time to fill raise them, but never above a step below the one to beat."""
    problem = drawn_problem(seed)
    plans = holding_plans(problem)[::2]
    steps = np.array([step_of(problem, plan) for plan in plans])
    below_s = float(np.median(steps))
    known = PlanBounds(problem, plans, below_s)
    for plan in plans[::3]:
        known.learn(plan, relax(Fleet(problem.models(plan), problem.buckets), below_s))
    is_better = steps < below_s
    assert is_better.any() and np.all(known.bounds_P[is_better] <= steps[is_better] * (1 + 1e-9))
    assert known.bounds_P.sum() > PlanBounds(problem, plans).bounds_P.sum()


def with_homes(problem: DeployProblem, seed: int, num_jobs: int) -> DeployProblem:
    """The same batch, of which a part belongs to jobs that have one home each."""
    rng, left = np.random.default_rng(seed), np.array(problem.buckets.counts, dtype=np.int64)
    homes = []
    for _ in range(num_jobs):
        homes.append(tuple(rng.binomial(left, 0.3).tolist()))
        left -= homes[-1]
    return replace(problem, buckets=replace(problem.buckets, at_home=tuple(homes)))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), num_gpus=st.integers(8, 12), num_jobs=st.integers(0, 3))
def test_plan_when_jobs_have_homes_then_none_of_all_plans_is_better(seed, num_gpus, num_jobs):
    problem = with_homes(drawn_problem(seed, num_gpus), seed, num_jobs)
    found = plan_deployment(problem)
    best = min(step_of(problem, plan) for plan in holding_plans(problem))
    assert found.step_s <= best * (1 + 1e-9) and found.is_complete
    assert found.bound_s <= found.step_s * (1 + 1e-9) and len(found.dispatch.homes) == num_jobs


def test_plan_when_the_only_job_has_a_home_then_there_is_one_replica_and_the_rest_stays_free():
    """Its samples may not be shared out, so replicas beside its home would stand idle."""
    jobs = [DeployJob("a", 32, KnownLengths((100, 200)), is_any_order) for is_any_order in (True, False)]
    shared, at_home = (
        plan_deployment(DeployProblem(drawn_problem(0).kinds, {"gpus": 8}, expected_batch([job]))) for job in jobs
    )
    assert len(shared.replicas) > 1 and shared.gpus_used == 8
    assert len(at_home.replicas) == 1 and at_home.step_s > shared.step_s and str(at_home.layout) != "stages:1"


def test_relaxed_plan_when_compared_with_every_plan_then_its_bound_is_below_all():
    problem = drawn_problem(0)
    found = relaxed_plan(problem, budget_s=5)
    steps = [step_of(problem, plan) for plan in holding_plans(problem)]
    assert found.bound_s <= min(steps) and step_of(problem, np.array(found.counts)) <= 1.1 * min(steps)


def test_plan_when_there_are_too_many_to_list_then_close_to_the_best_and_reports_how_close(monkeypatch):
    monkeypatch.setattr(planner, "MAX_LISTED", 1)
    for seed in range(3):
        problem = drawn_problem(seed)
        found = plan_deployment(problem)
        best = min(step_of(problem, plan) for plan in holding_plans(problem))
        assert best / (1 + found.gap) <= found.bound_s * (1 + 1e-9) <= best * (1 + 1e-9) and found.step_s <= 1.05 * best


@pytest.mark.parametrize("num_long", [5, 17])
def test_plan_when_there_is_no_time_and_few_samples_then_no_alike_replicas_are_better(num_long):
    """Whole samples decide there, of which the relaxation, and so the first plan, knows nothing."""
    times = {size: PaddedTime((0, 0, 1e-3 / size**0.8, 0, 0, 0)) for size in (1, 2, 4)}
    kinds = tuple(ReplicaKind(ReplicaTime(ReplicaLayout(tensor=size), 1024, t, 8, True)) for size, t in times.items())
    problem = DeployProblem(kinds, {"gpus": 16}, choose_buckets([900] * num_long + [50] * 64))
    found = plan_deployment(problem, budget_s=0.0)
    assert found.step_s <= min(step_of(problem, np.array(plan)) for plan in alike_counts(problem))


def test_plan_when_pools_differ_then_no_pool_is_overdrawn():
    first, second = drawn_problem(1).kinds, drawn_problem(2).kinds
    kinds = (*first, *(ReplicaKind(kind.model, "others") for kind in second))
    problem = DeployProblem(kinds, {"gpus": 8, "others": 4}, drawn_problem(1).buckets)
    found = plan_deployment(problem)
    used = {"gpus": 0, "others": 0}
    for kind in found.replicas:
        used[kind.pool] += kind.num_gpus
    assert used == {"gpus": 8, "others": 4} and " on others" in str(found)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), num_gpus=st.integers(1, 10))
def test_all_plans_when_counted_by_hand_then_the_same_and_none_leaves_room(sizes, num_gpus):
    time = PaddedTime((0, 0, 1, 0, 0, 0))
    kinds = tuple(ReplicaKind(ReplicaTime(ReplicaLayout(tensor=size), 100, time, 1)) for size in sizes)
    if min(sizes) > num_gpus:
        return
    problem = DeployProblem(kinds, {"gpus": num_gpus}, choose_buckets([64]))
    ranges = [range(num_gpus // size + 1) for size in sizes]
    by_hand = {plan for plan in itertools.product(*ranges) if 0 <= num_gpus - np.dot(plan, sizes) < min(sizes)}
    assert {tuple(plan) for plan in all_plans(problem).tolist()} == by_hand and num_plans(problem) == len(by_hand)


def test_candidates_when_one_is_slower_everywhere_then_it_is_left_out():
    buckets = choose_buckets([100, 900], 2)
    fast, slow = PaddedTime((0, 0, 1, 0, 0, 0)), PaddedTime((0, 0, 2, 0, 0, 0))
    short = ReplicaKind(ReplicaTime(ReplicaLayout(stages=2), 512, fast, 2))
    long = ReplicaKind(ReplicaTime(ReplicaLayout(tensor=2), 1024, slow, 1))
    worse = ReplicaKind(ReplicaTime(ReplicaLayout(stages=2), 512, slow, 2))
    assert without_dominated([short, long, worse], buckets) == [short, long]


def test_possible_layouts_when_machines_have_eight_then_replicas_divide_or_fill_them():
    found = possible_layouts(16, 8, num_layers=80, num_heads=8)
    sizes = {layout.num_devices for layout in found}
    assert (
        sizes == {1, 2, 4, 8, 16}
        and ReplicaLayout(tensor=2, stages=4) in found
        and ReplicaLayout(stages=3) not in found
    )
    assert max(layout.tensor for layout in found) == 8, "a head is not split"
    three = possible_layouts(3, 3, num_layers=4, num_heads=1)
    assert [layout.stages for layout in three] == [1, 2, 3], "two of three GPUs leave room for one"


def test_problem_when_it_cannot_be_then_refused():
    kinds, buckets = drawn_problem(0).kinds, drawn_problem(0).buckets
    with pytest.raises(PlanError, match="gpus: has 0 GPUs; at least 1"):
        DeployProblem(kinds, {"gpus": 0}, buckets)
    with pytest.raises(PlanError, match=r"the largest replica on these GPUs \(4 of gpus\) holds 2,048"):
        DeployProblem(kinds, {"gpus": 4}, choose_buckets([4000]))
    with pytest.raises(PlanError, match="there is no layout"):
        DeployProblem((), {"gpus": 4}, buckets)


def test_lengths_when_drawn_then_have_the_requested_mean_and_skewness():
    drawn = np.array(LengthSpread(500, 1.5, 100_000).draw(200_000, np.random.default_rng(0)))
    centred = drawn - drawn.mean()
    assert drawn.mean() == pytest.approx(500, rel=0.01)
    assert (centred**3).mean() / (centred**2).mean() ** 1.5 == pytest.approx(1.5, rel=0.1)
    with pytest.raises(PlanError, match="the mean length is 5"):
        LengthSpread(5, 1.0, 100)


def test_expected_batch_when_a_job_has_a_home_then_just_its_samples_are_there_and_its_longest():
    """Those that are shared out are rounded up, so that no bucket is forgotten."""
    rare = KnownLengths((100,) * 999 + (900,))
    free, at_home = (expected_batch([DeployJob("a", 4, rare, is_any_order)]) for is_any_order in (True, False))
    assert free.at_home == () and dict(zip(free.bounds, free.counts, strict=True)) == {128: 4, 960: 1}
    assert at_home.bounds == free.bounds and at_home.counts == (3, 1) and at_home.at_home == ((3, 1),)
    both = expected_batch([DeployJob("a", 4, rare), DeployJob("b", 2, KnownLengths((100, 500)), False)])
    assert sum(both.at_home[0]) == 2 and sum(both.counts) >= 6


def test_batches_when_drawn_then_every_job_has_its_part_in_each():
    jobs = [DeployJob("a", 2, KnownLengths((7,))), DeployJob("b", 3, KnownLengths((90,)))]
    assert draw_batches(jobs, 2) == [[7, 7, 90, 90, 90]] * 2
