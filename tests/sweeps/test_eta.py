"""How much longer a sweep takes is estimated from what its trials have taken."""

from __future__ import annotations

from typing import Any

import pytest

from weft.spec.sweep import SweepSpec
from weft.sweeps.live_board import remaining_s
from weft.sweeps.trials_file import Trial, TrialState


def spec(**budgets: Any) -> SweepSpec:
    return SweepSpec(base_model="tiny", defaults={"train_data": "rows.jsonl"}, space={"lr": [1e-3]}, **budgets)


def trial(number: int, state: TrialState, steps: int, **changes: Any) -> Trial:
    """A trial of 40 steps of 10 tokens."""
    return Trial(number, f"t{number}", {}, state, steps=steps, tokens=10 * steps, total_steps=40, **changes)


def test_eta_when_nothing_has_been_trained_then_it_is_not_known():
    assert remaining_s([trial(0, TrialState.WAITING, 0)], 4, 3.0, spec()) is None


def test_eta_when_trials_have_ended_early_then_those_to_come_are_expected_to():
    """60 steps took 30 s; 20 are left of the one that trains, and 10 of each of the two to come."""
    trials = [trial(0, TrialState.TRAINING, 20), trial(1, TrialState.TRAINING, 20)]
    assert remaining_s(trials, 2, 20.0, spec()) == pytest.approx(20.0)
    trials = [trial(0, TrialState.TRAINING, 20), *(trial(i, TrialState.STOPPED, 10) for i in (1, 2, 3, 4))]
    assert remaining_s(trials, 7, 30.0, spec()) == pytest.approx(30.0 * (20 + 2 * 10) / 60)
    taken_over = trial(9, TrialState.DONE, 40, origin="elsewhere")
    assert remaining_s([*trials, taken_over], 8, 30.0, spec()) == pytest.approx(20.0), "it took no time here"


def test_eta_when_a_budget_ends_the_sweep_sooner_then_that_counts():
    trials = [trial(0, TrialState.TRAINING, 20)]
    assert remaining_s(trials, None, 10.0, spec(max_tokens=300)) == pytest.approx(5.0)
    assert remaining_s(trials, 2, 10.0, spec(max_seconds=12.0)) == pytest.approx(2.0)
    assert remaining_s(trials, None, 10.0, spec(trials=3)) is None
