"""A full disk costs no job its training: the one that could not write waits, the others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import slow
from tiny_models import Job, job_spec, random_backbone, random_data

from weft.engine.engine import Engine
from weft.engine.events import Event, JobPaused, JobWarning, StepDone
from weft.errors import StorageError, WeftError
from weft.store import faults
from weft.store.run_dir import RunDirectory, RunRecord

TIMES = ("time", "eval_runtime")


def jobs() -> list[Job]:
    """One with evaluation, early stopping and best weights; one with a checkpoint at every step."""
    spec = job_spec(
        "evals", max_steps=4, save_steps=2, learning_rate=0.02, eval_data=2, eval_steps=1, early_stopping_patience=3
    )
    return [
        (spec, random_data(1, num_samples=5, num_eval=2)),
        (job_spec("saves", adapter={"lora_dropout": 0.2}, max_steps=3, save_steps=1), random_data(2, num_samples=5)),
    ]


NAMES = [spec.name for spec, _ in jobs()]


@pytest.fixture(scope="module")
def backbone():
    return random_backbone("llama_odd")


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def start(backbone, directory: RunDirectory) -> Engine:
    directory.write_run(RunRecord())
    engine = Engine(backbone, capacity=48)
    engine.keep_in(directory)
    for spec, data in jobs():
        engine.submit(spec, data)
    return engine


def files(path: Path, job: str) -> dict[str, Any]:
    """A job's adapter, and its metrics without times."""
    found: dict[str, Any] = {f.name: f.read_bytes() for f in (path / job / "adapter").iterdir()}
    records = [json.loads(line) for line in (path / job / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = [{k: v for k, v in record.items() if k not in TIMES} for record in records]
    return found


@pytest.fixture(scope="module")
def undisturbed(backbone, tmp_path_factory) -> tuple[dict[str, Any], int]:
    """The files of each job, and the number of moments at which the disk could have filled."""
    path = tmp_path_factory.mktemp("storage") / "run"
    with RunDirectory.open(path, resume=False) as directory:
        engine = start(backbone, directory)
        faults.arm(faults.FaultPlan("enospc", 10**6))
        engine.run()
    return {name: files(path, name) for name in NAMES}, faults.hits()


def run_with_full_disk(backbone, path: Path, moment: int) -> tuple[list[str], list[Event]]:
    """Trains with the disk full at one moment, then makes room and resumes; who had to wait, and all that happened."""
    events: list[Event] = []
    with RunDirectory.open(path, resume=False) as directory:
        engine = start(backbone, directory)
        faults.arm(faults.FaultPlan("enospc", moment))
        events.extend(engine.events())
        faults.disarm()
        waiting = [name for name, job in engine.jobs.items() if job.state == "paused"]
        for name in waiting:
            assert "the disk is full" in str(engine.jobs[name].reason)
            engine.resume(name)
        events.extend(engine.events())
        assert {name: str(job.state) for name, job in engine.jobs.items()} == dict.fromkeys(NAMES, "succeeded")
    return waiting, events


@pytest.mark.faults
@pytest.mark.parametrize("first", [3, slow(10), slow(17)])
def test_jobs_when_the_disk_fills_at_any_moment_then_all_end_with_the_undisturbed_files(
    backbone, undisturbed, tmp_path, first
):
    """Every 21st moment of a run, from its start to its end; all cases together: every seventh."""
    expected, moments = undisturbed
    assert moments > 200
    problems = {}
    for moment in range(first, moments, 21):
        path = tmp_path / str(moment)
        try:
            waiting, _ = run_with_full_disk(backbone, path, moment)
            assert len(waiting) <= 1, "a job waits that had no trouble"
            for name in NAMES:
                assert files(path, name) == expected[name], f"other files of {name}"
        except (AssertionError, WeftError) as error:
            problems[moment] = f"{type(error).__name__} {error}".splitlines()[0]
    assert not problems


@pytest.mark.parametrize(
    ("point", "number"),
    [("metrics.append", 1), ("metrics.append", 2), ("metrics.append", 3), ("metrics.append", 5)],
)
def test_job_when_a_metric_cannot_be_written_then_nothing_of_it_is_missing_after_resume(
    backbone, undisturbed, tmp_path, point, number
):
    """The evaluation that belongs to the step is still done, so early stopping decides as it would have."""
    expected, _ = undisturbed
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        faults.arm(moment_of(point, number))
        list(engine.events())
        faults.disarm()
        for name, job in engine.jobs.items():
            if job.state == "paused":
                engine.resume(name)
        engine.run()
    for name in NAMES:
        assert files(tmp_path / "run", name) == expected[name]


def test_job_when_there_is_room_again_at_the_end_of_the_run_then_it_is_saved_as_it_waits(backbone, tmp_path):
    """A process that ends takes what is only in its memory with it."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        faults.arm(moment_of("checkpoint.write", 2))
        saved = []
        for event in engine.events():
            if isinstance(event, JobPaused):
                faults.disarm()
            if event.kind == "checkpoint":
                saved.append((event.job, event.step))
        (waiting,) = [job for job in engine.jobs.values() if job.state == "paused"]
        assert saved[-1] == (waiting.name, waiting.step)
        status = directory.read_status(waiting.name)
        assert status is not None
        assert (status["state"], status["reason_code"], status["step"]) == ("paused", "storage", waiting.step)


def test_job_when_the_disk_stays_full_then_a_warning_reports_that_its_steps_are_in_memory_only(
    backbone, tmp_path, monkeypatch
):
    def full(*_: object, **__: object) -> None:
        raise StorageError("the disk is full.", where="run")

    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        monkeypatch.setattr("weft.engine.execute.weights.save_checkpoint", full)
        events = list(engine.events())
    warned = [event.jobs for event in events if isinstance(event, JobWarning) and "in memory only" in event.message]
    assert warned == [(name,) for name in NAMES]


@pytest.mark.parametrize("job", NAMES)
def test_job_when_its_adapter_cannot_be_written_then_it_is_written_after_resume(backbone, undisturbed, tmp_path, job):
    expected, _ = undisturbed
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        for event in engine.events():
            if event.kind == "checkpoint" and event.job == job and event.step == engine.jobs[job].num_steps:
                faults.arm(moment_of("file.write", 1))
        faults.disarm()
        assert engine.jobs[job].state == "paused"
        engine.resume(job)
        engine.run()
        assert engine.jobs[job].state == "succeeded"
    assert files(tmp_path / "run", job) == expected[job]


def moment_of(point: str, number: int) -> faults.FaultPlan:
    return faults.FaultPlan("enospc", number, point)


def test_job_when_a_checkpoint_cannot_be_written_then_pauses_with_the_reason_and_others_finish(
    backbone, undisturbed, tmp_path
):
    expected, _ = undisturbed
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        faults.arm(moment_of("checkpoint.write", 2))
        events = list(engine.events())
        assert [(e.job, e.step) for e in events if isinstance(e, JobPaused)] == [("evals", 2)]
        assert {name: str(job.state) for name, job in engine.jobs.items()} == {"evals": "paused", "saves": "succeeded"}
        assert files(directory.path, "saves") == expected["saves"]
        status = directory.read_status("evals")
        assert status["state"] == "paused" and "the disk is full" in status["reason"]
        faults.disarm()
        engine.resume("evals")
        engine.run()
        assert files(directory.path, "evals") == expected["evals"]


@pytest.mark.parametrize("point", ["dir.make", "file.write", "file.rename"])
def test_jobs_when_the_start_of_one_cannot_be_recorded_then_the_others_train(backbone, undisturbed, tmp_path, point):
    expected, _ = undisturbed
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        faults.arm(moment_of(point, 1))
        engine.run()
        assert engine.jobs["saves"].state == "succeeded"
    assert files(tmp_path / "run", "saves") == expected["saves"]


@pytest.mark.parametrize("action", ["cancel", "fail"])
def test_neighbours_when_the_end_of_a_job_cannot_be_recorded_then_go_on(backbone, undisturbed, tmp_path, action):
    expected, _ = undisturbed
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        engine.submit(job_spec("third", max_steps=50), random_data(3))
        for event in engine.events():
            if isinstance(event, StepDone) and (event.job, event.step) == ("saves", 1):
                if action == "cancel":
                    engine.cancel("third")
                else:
                    engine.executor.jobs["third"].weights.adapter.groups["a"].params.fill_(float("nan"))
            if isinstance(event, StepDone) and event.job == "third" and engine.jobs["third"].progress.diverged:
                faults.arm(moment_of("file.write", 1))
            if event.kind == "checkpoint" and event.job == "saves" and event.step == 1 and action == "cancel":
                faults.arm(moment_of("file.write", 1))
        assert engine.jobs["third"].state.is_final
    for name in NAMES:
        assert files(tmp_path / "run", name) == expected[name]


def test_run_when_the_timeline_cannot_be_written_then_the_jobs_have_still_succeeded(backbone, undisturbed, tmp_path):
    _, moments = undisturbed
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        faults.arm(faults.FaultPlan("enospc", moments))
        assert {str(job.state) for job in engine.run().values()} == {"succeeded"}
