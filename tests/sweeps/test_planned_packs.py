"""Over several replicas, trials whose order changes no result begin as the packing planner's plan has them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from test_sweep_replicas import found, run_sweep

from weft.plan.sweep import SweepPlan
from weft.sweeps import planned_packs, samplers

RATES = [1e-3, 2e-3, 3e-3, 4e-3]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[SweepPlan]:
    """All plans that are made."""
    made: list[SweepPlan] = []
    plan_sweep = planned_packs.plan_sweep

    def recorded(*args: Any, **options: Any) -> SweepPlan:
        made.append(plan_sweep(*args, **options))
        return made[-1]

    monkeypatch.setattr(planned_packs, "plan_sweep", recorded)
    return made


def test_grid_when_over_replicas_then_trials_begin_pack_by_pack(settings, plans):
    begun: list[str] = []

    def note(run: Any) -> bool:
        begun[:] = [trial.name for trial in run.trials]
        return False

    given = settings(space={"r": [2, 16], "global_batch_size": [6, 1], "lr": RATES}, job={"max_steps": 5})
    run_sweep(given, "one", 0)
    run_sweep(given, "many", 2, until=note)
    assert found("many") == found("one")
    (plan,) = plans
    packs = [set(pack.configurations) for pack in plan.packs]
    assert len(packs) > 1 and {gpu for pack in plan.packs for gpu in pack.gpus} == {0, 1}
    ends = [sum(map(len, packs[:count])) for count in range(len(packs) + 1)]
    assert [set(begun[start:end]) for start, end in itertools.pairwise(ends)] == packs


@pytest.mark.slow
def test_grid_when_packs_are_wider_than_usual_then_so_many_train_at_a_time(settings, plans):
    most = 0

    def count(run: Any) -> bool:
        nonlocal most
        most = max(most, sum(job.rank is not None for job in run.context.engine.jobs.values()))
        return False

    rates = [1e-4 * (1 + number) for number in range(70)]
    given = settings(space={"lr": rates}, job={"max_steps": 1, "global_batch_size": 1, "eval_data": 1})
    run_sweep(given, "many", 2, until=count)
    assert max(len(pack.configurations) for pack in plans[0].packs) == 35
    assert most > 64, "all at a time, and not 32 on each replica"


@pytest.fixture
def narrow(plans: list[SweepPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of one, as on devices with little memory, so that trials are left to begin later."""
    recorded = planned_packs.plan_sweep

    def cut(*args: Any, **options: Any) -> SweepPlan:
        plan = recorded(*args, **options)
        packs = [replace(pack, configurations=(name,)) for pack in plan.packs for name in pack.configurations]
        return replace(plan, packs=tuple(packs))

    monkeypatch.setattr(planned_packs, "plan_sweep", cut)
    monkeypatch.setattr(samplers, "AT_A_TIME", 1)


def test_grid_when_trials_end_before_their_time_then_the_rest_is_planned_anew(settings, plans, narrow):
    patience = {"max_steps": 12, "eval_steps": 1, "early_stopping_patience": 1}
    given = settings(space={"lr": [3e-1, 2e-1, 1e-1, *RATES]}, job=patience)
    run_sweep(given, "one", 0)
    run_sweep(given, "many", 2)
    assert found("many") == found("one")
    planned = [{name for pack in plan.packs for name in pack.configurations} for plan in plans]
    assert len(planned) > 1 and all(later < before for before, later in itertools.pairwise(planned))


def test_sweep_when_the_order_decides_or_max_jobs_is_given_then_nothing_is_planned(settings, plans):
    early = {"rule": "asha", "factor": 3, "grace": 3, "unit": "steps", "min_trials": 3}
    run_sweep(settings(space={"lr": RATES}, early_stop=early), "many", 2)
    run_sweep(settings(space={"lr": RATES}, max_jobs=2), "few", 2)
    assert not plans
