"""Trials of a run: what is tried, what is recommended, what is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.trials import ONE_DEVICE, RememberedTrials, Trial, TrialResult, TrialResults, capacities_around, search

NOW = Trial(1024)


def result(trial: Trial, rate: float) -> TrialResult:
    return TrialResult(trial, tokens=int(1000 * rate), seconds=1000.0, num_microbatches=2, rows=4000, row_tile=128)


def test_search_when_run_then_tries_capacities_first_and_other_layouts_with_the_two_fastest():
    """The run's own settings come first, and nothing is measured twice."""
    rates = {256: 50.0, 512: 120.0, 1024: 100.0, 2048: 90.0}
    tried: list[Trial] = []

    def measure(trial: Trial) -> TrialResult:
        tried.append(trial)
        return result(trial, rates[trial.capacity] * (2.0 if trial.layout == "stages:2" else 1.0))

    found = search(NOW, capacities_around(1024, 200), ["stages:2"], measure)
    assert tried[0] == NOW and len(tried) == len(set(tried)) == 6
    assert [trial.capacity for trial in tried if trial.layout == "stages:2"] == [512, 1024]
    assert found.now.trial == NOW and found.best.trial == Trial(512, "stages:2")


def test_capacities_when_a_sample_is_long_then_none_is_too_small_for_it():
    assert capacities_around(1024, 300) == [1024, 512, 2048]
    assert capacities_around(1024, 1000) == [1024, 2048]


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({NOW: 100.0, Trial(512): 102.0}, NOW),
        ({NOW: 100.0, Trial(512): 110.0}, Trial(512)),
        ({NOW: 100.0, Trial(512, "stages:2"): 151.0, Trial(1024, "stages:2"): 150.0}, Trial(1024, "stages:2")),
        ({NOW: 0.0, Trial(512): 5.0}, Trial(512)),
    ],
)
def test_best_when_others_are_about_as_fast_then_changes_least(rates, best):
    assert TrialResults(tuple(result(trial, rate) for trial, rate in rates.items())).best.trial == best


def test_trials_when_remembered_then_only_under_the_same_facts(tmp_path: Path):
    """A trial that failed is tried again, and a damaged file is no file."""
    known = RememberedTrials(tmp_path / "below" / "trials.json", {"run": 1})
    measured = result(NOW, 7.0)
    known.put(measured)
    known.put(TrialResult(Trial(2), problem="no room"))
    assert known.get(NOW) == measured and known.get(Trial(2)) is None
    assert known.get(Trial(1024, "stages:2")) is None
    assert RememberedTrials(known.path, {"run": 2}).get(NOW) is None
    known.path.write_text("[not json")
    assert known.get(NOW) is None


def test_result_when_shown_then_rows_and_fill_are_those_of_its_microbatches():
    assert result(NOW, 3.0).microbatch_rows == 2000 and result(NOW, 3.0).fill == 0.75
    assert TrialResult(NOW, problem="x").tokens_per_s == 0.0 and NOW.layout == ONE_DEVICE
