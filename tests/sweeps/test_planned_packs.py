"""Trials begin as the packing planner's plan has them, and the end of the sweep is predicted from it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_sweep_replicas import found, run_sweep

from weft.plan.sweep import SweepPlan, planner
from weft.sweeps import planned_packs, samplers
from weft.sweeps.trials_file import Trial, TrialState

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
    # What is left is planned to predict the end, and decides nothing.
    monkeypatch.setattr(planned_packs.PlannedPacks, "left_s", lambda self, trials: 1.0)
    return made


class Begun:
    """The trials of a sweep in the order in which they began."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, run: Any) -> bool:
        self.names = [trial.name for trial in run.trials]
        return False

    def in_packs(self, packs: list[set[str]]) -> list[set[str]]:
        ends = [sum(map(len, packs[:count])) for count in range(len(packs) + 1)]
        return [set(self.names[start:end]) for start, end in itertools.pairwise(ends)]


def test_grid_then_trials_begin_pack_by_pack_on_one_device_and_over_replicas(settings, plans, monkeypatch):
    # Little memory, so that not all trials are one pack on one device.
    monkeypatch.setattr(planner, "MAX_PACK", 4)
    given = settings(space={"r": [2, 16], "global_batch_size": [6, 1], "lr": RATES}, job={"max_steps": 5})
    for out, num_ranks, devices in (("one", 0, {0}), ("many", 2, {0, 1})):
        plans.clear()
        run_sweep(given, out, num_ranks, until=(begun := Begun()))
        (plan,) = plans
        packs = [set(pack.configurations) for pack in plan.packs]
        assert len(packs) > 1 and {gpu for pack in plan.packs for gpu in pack.gpus} == devices
        assert begun.in_packs(packs) == packs
    assert found("many") == found("one")


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


def test_grid_when_trials_end_before_their_time_then_the_rest_is_planned_again(settings, plans, narrow):
    patience = {"max_steps": 12, "eval_steps": 1, "early_stopping_patience": 1}
    given = settings(space={"lr": [3e-1, 2e-1, 1e-1, *RATES]}, job=patience)
    run_sweep(given, "one", 0)
    plans.clear()
    run_sweep(given, "many", 2)
    assert found("many") == found("one")
    planned = [{name for pack in plan.packs for name in pack.configurations} for plan in plans]
    assert len(planned) > 1 and all(later < before for before, later in itertools.pairwise(planned))


def test_asha_when_killed_in_the_middle_then_packs_are_those_of_one_device_before_and_after(
    settings, plans, monkeypatch
):
    monkeypatch.setattr(planner, "MAX_PACK", 2)
    monkeypatch.setattr(samplers, "AT_A_TIME", 3)
    early = {"rule": "asha", "factor": 3, "grace": 3, "unit": "steps", "min_trials": 3}
    given = settings(space={"r": [2, 16], "lr": RATES}, early_stop=early, job={"max_steps": 9})
    run_sweep(given, "one", 0, until=(begun := Begun()))
    packs = [set(pack.configurations) for pack in plans[0].packs]
    assert len(packs) == 4 and begun.in_packs(packs) == packs
    run_sweep(given, "many", 2, until=lambda run: any(trial.state.is_final for trial in run.trials))
    run_sweep(given, "many", 2, resume=True)
    assert [plan.packs for plan in plans] == [plans[0].packs] * 3
    assert found("many") == found("one")


def test_sweep_when_max_jobs_is_given_then_nothing_is_planned(settings, plans):
    run_sweep(settings(space={"lr": RATES}, max_jobs=2), "few", 0)
    assert not plans


def test_asha_when_trials_are_stopped_then_the_report_has_the_predicted_ends_beside_the_measured_one(settings):
    early = {"rule": "asha", "factor": 3, "grace": 3, "unit": "steps", "min_trials": 3}
    run_sweep(settings(space={"lr": [*RATES, 1e-5, 2e-5]}, early_stop=early, job={"max_steps": 14}), "one", 0)
    board = json.loads(Path("one/leaderboard.json").read_text())
    assert board["num_packs"] == 1 and len(board["predicted_ends"]) > 1
    assert all(0 < moment < end for moment, end in board["predicted_ends"])
    page = Path("one/report.html").read_text()
    assert "predicted from the first steps" in page and "after the last early stop" in page


def trial(number: int, steps: int, state: TrialState = TrialState.TRAINING) -> Trial:
    return Trial(number, f"t{number}", {}, state=state, steps=steps, total_steps=20)


def test_makespan_when_ten_steps_are_measured_then_the_end_is_predicted_and_again_after_a_stop():
    """Planned are 40 s for both trials; really a planned second takes three. Steps come in pairs."""

    def left_s(trials: list[Trial]) -> float:
        return sum(packs.work_s[t.name] * (1 - t.steps / 20) for t in trials if not t.state.is_final)

    packs = SimpleNamespace(work_s={"t0": 10.0, "t1": 30.0}, left_s=left_s)
    ends: list[tuple[float, float]] = []
    makespan = planned_packs.Makespan(packs, ends)
    for step in range(1, 13):
        now_s = 5.0 + 3 * 40 * step / 20
        makespan.note([trial(0, step), trial(1, step - 1)], now_s, has_step=True)
        makespan.note([trial(0, step), trial(1, step)], now_s, has_step=True)
    assert ends == [(5.0 + 3 * 24, pytest.approx(5.0 + 3 * 40, abs=5))]
    makespan.note([trial(0, 12), trial(1, 12, TrialState.STOPPED)], 77.0, has_step=False)
    assert ends[1:] == [(77.0, pytest.approx(77.0 + 3 * 10 * 8 / 20, abs=0.5))]
