"""Sweeps that are really trained have their figures, and what they compare is the same."""

from __future__ import annotations

import pytest

from benchmarks.sweeps.parts import TARGETS
from benchmarks.sweeps.train import HELD_OUT, measure_early_stop, measure_sweep_together


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.sweeps import train as sweep_train

    monkeypatch.setattr(sweep_train, "SPACE16", {"learning_rate": [1e-3, 4e-3], "r": [4, 8]})
    monkeypatch.setattr(sweep_train, "NUM_TRIALS", 10)
    monkeypatch.setattr(sweep_train, "NUM_EVAL", 4)


@pytest.mark.slow
def test_together_when_measured_then_every_configuration_ends_as_one_by_one(few):
    figures = measure_sweep_together({1: 3}, rounds=1)
    assert figures["cpu16_processes"] == pytest.approx(4 * figures["cpu16_process_s"] / figures["cpu16_together_s"])
    assert figures["cpu16"] == pytest.approx(figures["cpu16_one_by_one_s"] / figures["cpu16_together_s"])
    assert figures["cpu16_largest_difference"] == 0 and figures["cpu16_same_best"] == 1


@pytest.mark.slow
def test_early_stop_when_measured_then_trains_fewer_tokens(few):
    figures = measure_early_stop([("spell", 1)], steps=9)
    assert figures["early_stop_tokens"] == figures["early_stop_tokens_least"] > 1
    assert figures["early_stop_same_best"] in (0, 1) and figures["early_stop_worst_value"] >= 0


def test_tasks_when_read_then_are_at_least_four_and_none_that_the_rule_was_chosen_on():
    assert len(HELD_OUT) >= 4
    assert min(seed for _, seed in HELD_OUT) >= 33
    assert {"cpu16", "early_stop_tokens"} <= TARGETS.keys()
