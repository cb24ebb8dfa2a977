"""Deployments from LobRA's published tables: shapes of its plans, order of its ablation."""

from __future__ import annotations

import pytest

from benchmarks.deploy.published import (
    FOUR,
    LAYERS_7B,
    SIX,
    TABLE_3,
    TABLE_8,
    TABLE_11,
    K,
    fitted_7b,
    published_jobs,
    replicas_7b,
    replicas_70b,
)
from weft.plan.cost.fit import FitError
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.kinds import without_dominated
from weft.plan.deploy.planner import plan_alike
from weft.plan.deploy.types import expected_batch


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_fitted_7b_then_meets_both_tables(degree):
    """LobRA reports its own predictions to be within a tenth."""
    time = fitted_7b(degree)
    rows = [row for row in TABLE_11 if row[0] == degree]
    predicted = [time.step_s([(count, 1, length)], LAYERS_7B, stages) for _, stages, length, count, _ in rows]
    measured = [row[-1] for row in rows]
    for layout, rates in TABLE_3.items():
        if layout == (degree, 1):
            most = 2048 << (len(rates) - 1)
            predicted += [time.step_s([(most // s, most // s, s)], LAYERS_7B) for s in (2048, most)]
            measured += [most / (rate * K * degree) for rate in (rates[0], rates[-1])]
    assert FitError.of(predicted, measured).mape < 0.1


def problem_70b(num_gpus: int, num_tasks: int = 4) -> DeployProblem:
    """LobRA's four tasks of its scalability experiments, again and again up to so many."""
    batch = expected_batch(published_jobs(FOUR) * (num_tasks // len(FOUR)))
    kinds = without_dominated([ReplicaKind(model) for model in replicas_70b(num_gpus)], batch)
    return DeployProblem(tuple(kinds), {"gpus": num_gpus}, batch)


@pytest.mark.parametrize("num_tasks", [4, 8, 12, 16])
def test_plan_70b_when_there_are_more_tasks_then_of_the_shape_of_table_9(num_tasks):
    """Alike replicas are four of sixteen GPUs; unlike ones one such, and small ones for the other 48 GPUs."""
    problem = problem_70b(64, num_tasks)
    assert str(plan_alike(problem)) == "tensor:16×4"
    sizes = [kind.num_gpus for kind in plan_deployment(problem, budget_s=2.0).replicas]
    assert sum(sizes) == 64 and sizes.count(16) == 1 and max(sizes) == 16


@pytest.mark.parametrize(("num_gpus", "alike"), [(16, "tensor:16×1"), (32, "tensor:16×2"), (64, "tensor:16×4")])
def test_plan_70b_when_gpus_must_hold_alike_replicas_then_those_of_table_10(num_gpus, alike):
    """Where there is room for more than one, unlike ones are faster; with 16 GPUs there is no choice."""
    problem = problem_70b(num_gpus)
    fused = plan_alike(problem)
    assert str(fused) == alike
    ratio = plan_deployment(problem, budget_s=2.0).step_s / fused.step_s
    assert ratio == pytest.approx(1.0) if num_gpus == 16 else ratio < 0.8


@pytest.mark.parametrize("num_gpus", [16, 24, 32, 48])
def test_plan_70b_when_given_table_5s_tasks_then_of_the_published_shape(num_gpus):
    """One large replica for the longest samples, all GPUs used, and beyond 32 GPUs most replicas small."""
    found = plan_deployment(problem_70b(num_gpus))
    layouts = [str(kind.layout) for kind in found.replicas]
    assert found.gpus_used == num_gpus and layouts.count("tensor:16") == 1
    if num_gpus == 16:
        assert layouts == ["tensor:16"]
    if num_gpus > 32:
        assert sum(kind.num_gpus <= 8 for kind in found.replicas) > len(layouts) / 2


def test_table_8_when_its_gpus_are_counted_then_each_task_has_all_64_and_room_for_its_longest_sample():
    known = {(model.layout.tensor, model.layout.stages): model for model in replicas_70b(64)}
    for job in published_jobs():
        own = [known[layout] for layout, count in TABLE_8[job.name].items() for _ in range(count)]
        assert sum(model.layout.num_devices for model in own) == 64, job.name
        assert max(model.most_tokens for model in own) >= job.lengths.longest, job.name


def test_plan_7b_when_given_table_2s_tasks_then_of_the_published_shape():
    """Alike replicas need eight GPUs each; unlike ones are one such and small ones beside it."""
    batch = expected_batch(published_jobs(SIX))
    problem = DeployProblem(tuple(ReplicaKind(model) for model in replicas_7b()), {"gpus": 16}, batch)
    assert str(plan_alike(problem)) == "tensor:8×2"
    found = plan_deployment(problem)
    sizes = [kind.num_gpus for kind in found.replicas]
    assert "tensor:8×1" in str(found) and sizes.count(8) == 1 and sizes.count(1) >= 4 and sum(sizes) == 16
