"""`python -m benchmarks replicas --regime kills_differ`: what is counted of runs in which something dies."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest

from benchmarks.replicas import killed
from benchmarks.replicas.killed import ACTOR, CONTROLLER, NODE, RANK, measure_kills
from benchmarks.replicas.trained import SmallJobs


def test_kinds_when_ray_is_there_then_half_are_ranks_and_the_others_take_turns(monkeypatch):
    for has_ray, others in ((True, [CONTROLLER, ACTOR, NODE]), (False, [CONTROLLER] * 3)):
        monkeypatch.setattr(killed, "has_ray", lambda has_ray=has_ray: has_ray)
        kinds = killed._kinds()
        drawn = [next(kinds) for _ in range(6)]
        assert drawn[::2] == [RANK] * 3 and drawn[1::2] == others


@pytest.mark.slow
@pytest.mark.faults
def test_kills_when_a_rank_dies_then_it_counts_and_nothing_differs(monkeypatch):
    monkeypatch.setattr(killed, "_kinds", lambda: itertools.repeat(RANK))
    found = measure_kills(SmallJobs(num_jobs=2, num_steps=4, save_steps=2), num_kills=1, seed=5)
    assert found["num_kills"] == 1 and found["kills_differ"] == found["kills_repeated"] == 0


def test_kills_when_a_neighbour_repeats_a_step_then_it_is_counted(tmp_path, monkeypatch):
    """Only jobs of a rank that died may take a step twice."""
    steps = [("a", 1), ("b", 1), ("a", 2), ("a", 2), ("b", 1)]

    def execute(run, directory, on_event):
        for job, number in steps[:3]:
            on_event(_step(job, number))
        on_event(killed.JobWarning(("a",), "replica 0 was ended by signal 9; its jobs go on"))
        for job, number in steps[3:]:
            on_event(_step(job, number))

    _stub_runs(monkeypatch, execute)
    _, repeated = killed._Runs(tmp_path, None, None).disturb("out", lambda group: None, lambda order: None)
    assert repeated == 1


def _step(job: str, number: int) -> killed.StepDone:
    values = {field.name: 0.0 for field in dataclasses.fields(killed.StepDone)}
    return killed.StepDone(**{**values, "job": job, "step": number, "tokens": 100, "metrics": {}})


def _stub_runs(monkeypatch: pytest.MonkeyPatch, execute) -> None:
    monkeypatch.setattr(killed, "WatchedGroup", lambda ranks, number: types.SimpleNamespace())
    monkeypatch.setattr(killed, "rank_order", lambda spec, specs: None)
    monkeypatch.setattr(killed.ReplicatedEngine, "load", lambda *given, **named: None)

    def prepare(spec, *, base_dir, open_engine):
        open_engine(None, (), None)
        return types.SimpleNamespace(engine=types.SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(killed, "prepare_run", prepare)
    monkeypatch.setattr(killed, "execute_run", execute)
