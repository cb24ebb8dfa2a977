"""Deployments from LobRA's published tables: shapes of its plans, order of its ablation."""

from __future__ import annotations

import pytest

from weft.bench.deploy.published import (
    FOUR,
    LAYERS_7B,
    SIX,
    TABLE_3,
    TABLE_11,
    K,
    fitted_7b,
    published_jobs,
    replicas_7b,
    replicas_70b,
)
from weft.cost.fit import FitError
from weft.plan.deploy import DeployProblem, ReplicaKind, plan_deployment
from weft.plan.deploy.baselines import plan_alike
from weft.plan.deploy.candidates import without_dominated
from weft.plan.deploy.expected import expected_batch


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_fitted_7b_when_asked_for_both_tables_then_meets_them(degree):
    """LobRA says of its own predictions that they are within a tenth."""
    time = fitted_7b(degree)
    rows = [row for row in TABLE_11 if row[0] == degree]
    predicted = [time.step_s([(count, 1, length)], LAYERS_7B, stages) for _, stages, length, count, _ in rows]
    measured = [row[-1] for row in rows]
    for layout, rates in TABLE_3.items():
        if (layout.tensor_parallel, layout.num_stages) == (degree, 1):
            most = 2048 << (len(rates) - 1)
            predicted += [time.step_s([(most // s, most // s, s)], LAYERS_7B) for s in (2048, most)]
            measured += [most / (rate * K * degree) for rate in (rates[0], rates[-1])]
    assert FitError.of(predicted, measured).mape < 0.1


@pytest.mark.parametrize("num_gpus", [16, 24, 32, 48])
def test_plan_70b_when_given_table_5s_tasks_then_of_the_published_shape(num_gpus):
    """One large replica for the longest samples, all GPUs used, and beyond 32 GPUs most replicas small."""
    batch = expected_batch(published_jobs(FOUR))
    kinds = without_dominated([ReplicaKind(model) for model in replicas_70b(num_gpus)], batch)
    found = plan_deployment(DeployProblem(tuple(kinds), {"gpus": num_gpus}, batch))
    layouts = [str(kind.layout) for kind in found.replicas]
    assert found.gpus_used == num_gpus and layouts.count("<16,1>") == 1
    if num_gpus == 16:
        assert layouts == ["<16,1>"]
    if num_gpus > 32:
        assert sum(kind.num_gpus <= 8 for kind in found.replicas) > len(layouts) / 2


def test_plan_7b_when_given_table_2s_tasks_then_of_the_published_shape():
    """Alike replicas need eight GPUs each; unlike ones are one such and small ones beside it."""
    batch = expected_batch(published_jobs(SIX))
    problem = DeployProblem(tuple(ReplicaKind(model) for model in replicas_7b()), {"gpus": 16}, batch)
    assert str(plan_alike(problem)) == "<8,1>×2"
    found = plan_deployment(problem)
    sizes = [kind.num_gpus for kind in found.replicas]
    assert "<8,1>×1" in str(found) and sizes.count(8) == 1 and sizes.count(1) >= 4 and sum(sizes) == 16
