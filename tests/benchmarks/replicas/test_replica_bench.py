"""`python -m benchmarks replicas`: its figures come from placements that were checked and runs that were simulated."""

from __future__ import annotations

from benchmarks.replicas import placing
from benchmarks.replicas.placing import (
    jobs_speedup,
    measure_eight,
    measure_placing,
    mixed_jobs,
    paper_trials,
    trials_speedup,
)


def test_placing_when_measured_on_few_jobs_then_every_figure_is_there():
    figures = measure_placing(num_jobs=30, num_replicas=4)
    assert figures.keys() == {"place_1000_s", "place_1000_ratio"}
    assert 0 < figures["place_1000_s"] < 60
    assert 1 <= figures["place_1000_ratio"] < 1.34


def test_jobs_when_eight_replicas_then_the_target_is_met():
    """Deterministic, since it is simulated: 64 jobs of mixed lengths end at least 7.6 times as soon."""
    jobs = mixed_jobs()
    assert len(jobs) == 64 and max(c.seconds_left for c in jobs) > 10 * min(c.seconds_left for c in jobs)
    assert 7.6 <= jobs_speedup(jobs) <= 8


def test_trials_when_the_packing_planner_has_eight_gpus_then_it_uses_them():
    trials = paper_trials()
    assert len(trials) == 120
    assert 7 <= trials_speedup(trials[::8]) <= 8


def test_eight_when_measured_then_the_smaller_speedup_counts(monkeypatch):
    monkeypatch.setattr(placing, "jobs_speedup", lambda _: 7.9)
    monkeypatch.setattr(placing, "trials_speedup", lambda _: 7.7)
    assert measure_eight() == {"sim8": 7.7, "sim8_jobs": 7.9, "sim8_trials": 7.7}
