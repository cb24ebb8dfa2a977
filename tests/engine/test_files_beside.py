"""On a device that works on, files are written meanwhile; training never waits for the disk; nothing else differs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow
from test_storage_faults import NAMES, files, start
from tiny_models import job_spec, random_data, shallow_backbone

from weft.engine.engine import Engine
from weft.engine.events import CheckpointSaved, Event, JobFailed, JobPaused, JobStarted, JobSucceeded, StepDone
from weft.engine.execute import weights
from weft.model.backbone import Backbone
from weft.store import faults
from weft.store.checkpoint import latest_checkpoint, load_checkpoint
from weft.store.run_dir import RunDirectory, RunRecord


@pytest.fixture(autouse=True)
def _works_on(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(Backbone, "works_on", True)
    yield
    faults.disarm()


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


@pytest.fixture(scope="module")
def undisturbed(backbone, tmp_path_factory) -> tuple[dict[str, Any], int]:
    """The files of each job where everything is written at once, and the moments at which a disk could fill."""
    path = tmp_path_factory.mktemp("beside") / "run"
    with RunDirectory.open(path, resume=False) as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(Backbone, "works_on", False)
        faults.arm(faults.FaultPlan("enospc", 10**6))
        start(backbone, directory).run()
    return {name: files(path, name) for name in NAMES}, faults.hits()


class Door:
    """Holds up the writing of checkpoints or adapters until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.is_open = threading.Event()
        self.calls: list[Path] = []
        write = getattr(weights, name)

        def held(directory: Path, *args: Any, **options: Any) -> Any:
            self.calls.append(directory)
            assert self.is_open.wait(60)
            return write(directory, *args, **options)

        monkeypatch.setattr(weights, name, held)


def test_run_when_files_are_written_beside_it_then_they_are_the_same_files(backbone, undisturbed, tmp_path):
    """What is written is what was there at the step boundary, whatever training did in the meantime."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        jobs = start(backbone, directory).run()
    assert {str(job.state) for job in jobs.values()} == {"succeeded"}
    for name in NAMES:
        assert files(tmp_path / "run", name) == undisturbed[0][name]


def test_training_when_a_checkpoint_takes_long_then_goes_on_and_the_checkpoint_holds_its_own_step(
    backbone, tmp_path, monkeypatch
):
    """Until the job's next one is due: there is at most one snapshot of a job."""
    door = Door(monkeypatch, "save_checkpoint")
    spec = job_spec("a", max_steps=9, save_steps=4, save_total_limit=3)
    received: list[Event] = []
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        engine.submit(spec, random_data(2, num_samples=5))
        at_step: dict[int, dict[str, Any]] = {}
        for event in engine.events():
            received.append(event)
            if isinstance(event, StepDone):
                at_step[event.step] = engine.adapter_of("a")
            if isinstance(event, StepDone) and event.step == 7:
                assert len(door.calls) == 1
                assert not [e for e in received if isinstance(e, CheckpointSaved)]
                door.is_open.set()
    assert [e.step for e in received if isinstance(e, CheckpointSaved)] == [4, 8, 9]
    kinds = [(type(e), e.step) for e in received if isinstance(e, StepDone | CheckpointSaved | JobSucceeded)]
    assert kinds.index((CheckpointSaved, 4)) > kinds.index((StepDone, 7))
    for step in (4, 8):
        saved = load_checkpoint(tmp_path / "run/a/checkpoints" / f"step-{step:08d}").tensors["params_a"]
        assert torch.equal(saved, torch.cat([a.reshape(-1) for a, _ in at_step[step].values()]))


def test_job_when_it_has_ended_then_the_next_gets_its_seat_before_its_files_are_written(
    backbone, tmp_path, monkeypatch
):
    """It has succeeded only when they are."""
    door = Door(monkeypatch, "write_adapter")
    received: list[Event] = []
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = Engine(backbone, capacity=48, max_jobs=1)
        engine.keep_in(directory)
        for seed, name in enumerate(("a", "b")):
            engine.submit(job_spec(name, max_steps=3), random_data(seed, num_samples=5))
        for event in engine.events():
            received.append(event)
            if isinstance(event, JobStarted) and event.job == "b":
                assert engine.jobs["a"].state == "running"
                assert engine.executor.jobs["a"].weights.slot is None, "its memory is free as well"
                engine.cancel("a")  # comes too late
                engine.pause("a")
            if isinstance(event, StepDone) and event.job == "b" and event.step == 2:
                door.is_open.set()
    assert [e.job for e in received if isinstance(e, JobSucceeded)] == ["a", "b"]
    assert {str(job.state) for job in engine.jobs.values()} == {"succeeded"}


def test_reader_when_it_leaves_after_any_event_then_every_job_still_ends(backbone, undisturbed, tmp_path):
    """Also between the last checkpoint and the adapter."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        while any(not job.state.is_final for job in engine.jobs.values()):
            for _ in engine.events():
                break
    for name in NAMES:
        assert files(tmp_path / "run", name) == undisturbed[0][name]


def test_stop_when_files_are_under_way_then_every_job_is_saved_where_it_stands(backbone, tmp_path):
    """The directory can be left at once: nothing is written after the last event."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        for event in engine.events():
            if isinstance(event, StepDone) and event.step == 2:
                engine.stop()
        for name, job in engine.jobs.items():
            checkpoint, rejected = latest_checkpoint(directory.checkpoints_dir(name))
            assert checkpoint is not None
            assert (checkpoint.step, rejected) == (job.step, [])
            assert directory.read_status(name)["state"] == str(job.state) == "paused"


def test_stop_when_the_adapter_of_a_job_is_under_way_then_events_end_once_it_is_there(backbone, tmp_path, monkeypatch):
    """The directory is complete when it is left after the last event."""
    door = Door(monkeypatch, "write_adapter")
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        engine.submit(job_spec("a", max_steps=3), random_data(0, num_samples=5))
        engine.submit(job_spec("b", max_steps=40), random_data(1, num_samples=5))
        for event in engine.events():
            if isinstance(event, StepDone) and event.job == "b" and door.calls:
                engine.stop()
                threading.Timer(0.1, door.is_open.set).start()
        assert (directory.adapter_dir("a") / "adapter_model.safetensors").exists()
        assert str(engine.jobs["a"].state) == directory.read_status("a")["state"]


def test_job_when_something_unexpected_is_raised_while_it_is_written_then_it_fails_alone(
    backbone, undisturbed, tmp_path, monkeypatch
):
    """Whatever one job raises is that job's alone, in whichever thread."""
    write = weights.save_checkpoint

    def broken(directory: Path, *args: Any, **options: Any) -> Any:
        if directory.parent.name == "evals":
            raise ValueError("no such thing")
        return write(directory, *args, **options)

    monkeypatch.setattr(weights, "save_checkpoint", broken)
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        (failed,) = [event for event in engine.events() if isinstance(event, JobFailed)]
    assert failed.job == "evals"
    assert files(tmp_path / "run", "saves") == undisturbed[0]["saves"]


def test_job_when_its_checkpoint_cannot_be_written_then_the_next_is_due_as_soon_as_it_goes_on(backbone, tmp_path):
    """The job may be further by then; no more steps are at stake than the user chose."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        directory.write_run(RunRecord())
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        engine.submit(job_spec("a", max_steps=36, save_steps=20), random_data(2, num_samples=5))
        faults.arm(faults.parse("enospc@1:checkpoint.write"))
        (paused,) = [event for event in engine.events() if isinstance(event, JobPaused)]
        faults.disarm()
        engine.resume("a")
        saved = [event.step for event in engine.events() if isinstance(event, CheckpointSaved)]
    assert saved in ([paused.step, 36], [paused.step + 1, 36])


@pytest.mark.faults
@pytest.mark.parametrize("first", [5, slow(18), slow(31)])
def test_jobs_when_the_disk_fills_while_they_train_on_then_all_end_with_the_undisturbed_files(
    backbone, undisturbed, tmp_path, first
):
    """Every 39th moment, all cases together every 13th; a job that waits for room goes on from where it stands."""
    expected, moments = undisturbed
    for moment in range(first, moments, 39):
        with RunDirectory.open(tmp_path / str(moment), resume=False) as directory:
            engine = start(backbone, directory)
            faults.arm(faults.FaultPlan("enospc", moment))
            paused = [event for event in engine.events() if isinstance(event, JobPaused)]
            faults.disarm()
            assert len({event.job for event in paused}) <= 1, moment
            for name, job in engine.jobs.items():
                if job.state == "paused":
                    engine.resume(name)
            engine.run()
        for name in NAMES:
            assert str(engine.jobs[name].state) == "succeeded", moment
            assert files(tmp_path / str(moment), name) == expected[name], moment


def test_snapshots_when_there_is_room_for_one_then_the_next_job_waits_until_it_is_written(
    backbone, undisturbed, tmp_path
):
    """A slow disk does not fill the machine's memory."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = start(backbone, directory)
        job_files = engine._keeper.files
        job_files._room_bytes = 0
        begin, most = job_files.start, []

        def counted(job: Any, *args: Any) -> None:
            begin(job, *args)
            most.append(len({file.job.name for file in job_files._under_way}))

        job_files.start = counted  # type: ignore[method-assign]
        engine.run()
    assert max(most) == 1
    for name in NAMES:
        assert files(tmp_path / "run", name) == undisturbed[0][name]
