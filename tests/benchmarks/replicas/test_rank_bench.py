"""`python -m benchmarks replicas`: what is read from ranks that train, are killed, or are scripted."""

from __future__ import annotations

import dataclasses
import os
import types

import pytest

from benchmarks.replicas import trained
from benchmarks.replicas.controller import measure_controller
from benchmarks.replicas.parts import ON_GPU, PARTS, choose_parts
from benchmarks.replicas.trained import ADAPTER, Killing, Pace, SmallJobs, differing_adapters
from weft.engine.events import JobStarted, StepDone
from weft.errors import WeftError


def step(job: str, number: int) -> StepDone:
    values = {field.name: 0.0 for field in dataclasses.fields(StepDone)}
    return StepDone(**{**values, "job": job, "step": number, "tokens": 100, "metrics": {}})


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test advances them."""
    now = types.SimpleNamespace(s=10.0)
    monkeypatch.setattr(trained.time, "perf_counter", lambda: now.s)
    return now


def test_pace_when_jobs_start_and_step_then_time_runs_from_the_first_start_to_the_last_step(clock):
    pace, engine = Pace(), None
    for seconds, event in [(20, JobStarted("a", 0, 9)), (22, JobStarted("b", 0, 9)), (24, step("a", 1))]:
        clock.s = seconds
        pace.observe(event, engine)
    clock.s = 30
    pace.observe(step("b", 1), engine)
    assert pace.tokens_per_s == 200 / 10


def test_pace_when_no_job_stepped_then_there_is_no_figure():
    with pytest.raises(WeftError, match="no job took a step"):
        Pace().tokens_per_s  # noqa: B018


def test_killing_when_steps_of_the_dead_rank_are_still_reported_then_only_those_after_a_new_start_count(
    clock, monkeypatch
):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    jobs = {name: types.SimpleNamespace(name=name, rank=rank) for name, rank in [("a", 0), ("b", 1), ("c", 1)]}
    engine = types.SimpleNamespace(jobs=jobs, process_ids={0: 100, 1: 101})
    killing = Killing()
    killing.observe(step("b", 3), engine)
    assert not killed
    killing.observe(step("b", 4), engine)
    assert killed == [101] and killing.lost == {"b", "c"}
    clock.s = 13
    for event in (step("c", 4), step("a", 5), JobStarted("b", 2, 9), JobStarted("c", 2, 9), step("b", 3)):
        killing.observe(event, engine)
    assert not killing.is_over
    with pytest.raises(WeftError, match="took no step again"):
        killing.recovered_s  # noqa: B018
    clock.s = 16
    killing.observe(step("c", 3), engine)
    assert killing.is_over and killing.recovered_s == 6


def test_small_jobs_when_written_then_they_are_a_run_on_the_processor(tmp_path):
    run = SmallJobs(num_jobs=3, num_steps=5, save_steps=2).write(tmp_path)
    assert [job.max_steps for job in run.jobs] == [5] * 3 and run.device == "cpu"
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == trained.NUM_ROWS


def test_adapters_when_one_differs_or_is_missing_then_it_is_named(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for out, job, content in [(one, "a", "x"), (two, "a", "x"), (one, "b", "x"), (two, "b", "y"), (one, "c", "x")]:
        (out / job / ADAPTER).parent.mkdir(parents=True)
        (out / job / ADAPTER).write_text(content)
    assert differing_adapters(one, two) == ["b", "c"]
    with pytest.raises(WeftError, match="no adapter was written"):
        differing_adapters(tmp_path / "gone", tmp_path / "gone")


def test_parts_when_there_is_no_gpu_then_those_that_need_one_are_left_out():
    assert choose_parts([], has_gpu=True) == PARTS
    assert choose_parts([], has_gpu=False).keys() == PARTS.keys() - ON_GPU


def test_controller_when_its_ranks_are_scripted_then_every_job_is_followed_to_its_end():
    found = measure_controller(num_ranks=3, num_steps=4)
    assert found.keys() == {"controller_us", "controller_end_ms"}
    assert 0 < found["controller_us"] < 1e6
