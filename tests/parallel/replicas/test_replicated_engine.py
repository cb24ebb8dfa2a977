"""Jobs over any number of ranks end with the bits of one engine, wherever each trains and whatever happens."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow
from replicated_runs import files_of, opened, run_spec, train, write_data

from weft.engine.events import Event, JobEnded, JobPreempted, JobStarted, JobWaiting, JobWarning, StepDone
from weft.engine.execute.memory import load_within
from weft.engine.execute.protocol import ReplicaFaultError
from weft.engine.jobs.lifecycle import JobTransitions
from weft.engine.jobs.live_job import LiveJob
from weft.engine.train import execute_run
from weft.errors import ConfigError, JobError, StorageError
from weft.job_state import Reason, ReasonCode
from weft.parallel.replicas import rank as rank_module
from weft.parallel.replicas import rank_group, replicated_engine
from weft.parallel.replicas.records import JobRecord, RankRecord
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.plan.admit import Admission, HeldJob
from weft.plan.place import JobPlacement, Move
from weft.spec import AdapterSpec, JobSpec
from weft.store.atomic import TEMP_PREFIX
from weft.store.owner import Owner
from weft.store.run_dir import RankDirectory, RunDirectory, RunFiles

NAMES = [job.name for job in run_spec().jobs]
DIVERGES = "diverges"
FINAL = {name: "failed" if name == DIVERGES else "succeeded" for name in NAMES}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_data(path)
    return path


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of every job where one engine trains all of them."""
    out = tmp_path_factory.mktemp("alone") / "out"
    states, _ = train(run_spec(), data, out, 0)
    assert states == FINAL
    return {name: files_of(out, name) for name in NAMES}


def assert_same(out: Path, expected: dict[str, Any], events: Sequence[Event]) -> None:
    """Every job has the same files, and has ended once."""
    for name in NAMES:
        assert files_of(out, name) == expected[name], name
    assert Counter(event.job for event in events if isinstance(event, JobEnded)) == Counter(NAMES)
    assert not list(out.rglob(".tmp-weft-*"))


def dealing(rng: random.Random) -> Callable[..., JobPlacement]:
    """Deals all jobs out at random at each call, and now and then lets one wait."""

    def decide(jobs: Sequence[JobRecord], ranks: Sequence[RankRecord], *rest: object) -> JobPlacement:
        ready = [str(rank.index) for rank in ranks if rank.ready is not None]
        wanting = [job for job in jobs if job.wants_rank]
        seats = {job.name: rng.choice(ready) for job in wanting if ready and rng.random() < 0.8}
        if ready and wanting and not seats:
            seats = {wanting[0].name: ready[0]}
        reason = Reason(ReasonCode.GAVE_WAY, "waits for its turn")
        sitting = {job.name: str(job.rank) for job in wanting if job.rank is not None}
        return JobPlacement(
            Admission(
                start=tuple(name for name in seats if name not in sitting),
                keep=tuple(name for name in seats if name in sitting),
                preempt=tuple(HeldJob(name, reason) for name in sitting if name not in seats),
                wait=tuple(HeldJob(job.name, reason) for job in wanting if job.name not in {**seats, **sitting}),
            ),
            seats,
            tuple(Move(n, at, seats[n]) for n, at in sitting.items() if n in seats and seats[n] != at),
            0.0,
        )

    return decide


def reassign(engine: Any, event: Event) -> None:
    """Has the next look at who trains where happen at once."""
    if isinstance(event, StepDone | JobStarted | JobPreempted | JobWaiting):
        engine._is_stale = True


@pytest.mark.parametrize(("num_ranks", "max_jobs"), [slow(1, None), (2, 1), (3, None)])
def test_run_when_over_any_number_of_ranks_then_leaves_the_files_of_one_engine(
    data, expected, tmp_path, num_ranks, max_jobs
):
    states, events = train(run_spec(max_jobs=max_jobs), data, tmp_path / "out", num_ranks)
    assert states == FINAL
    assert_same(tmp_path / "out", expected, events)
    waited = [event for event in events if isinstance(event, JobWaiting)]
    assert len(waited) == (3 if max_jobs else 0)
    if max_jobs:
        started = [event.job for event in events if isinstance(event, JobStarted)]
        assert "urgent" in started[:2], "the higher priority comes first"
    assert (tmp_path / "out" / "timeline.json").exists() and not list((tmp_path / "out").glob(".timeline-*"))
    layout = "stages:1" if num_ranks == 1 else f"spread:{num_ranks}"
    assert RunFiles(tmp_path / "out").read_run().layouts == (layout,)


@pytest.mark.parametrize("seed", [1, slow(2)])
def test_run_when_jobs_are_dealt_out_at_random_all_the_time_then_changes_no_bit(
    data, expected, tmp_path, monkeypatch, seed
):
    """Moves, preemptions and waits at any step, with dropout, evaluations and early stopping."""
    monkeypatch.setattr(replicated_engine, "decide", dealing(random.Random(seed)))
    states, events = train(run_spec(), data, tmp_path / "out", 3, reassign)
    assert states == FINAL
    assert_same(tmp_path / "out", expected, events)
    assert sum(isinstance(event, JobStarted) and event.step > 0 for event in events) >= 8
    assert any(isinstance(event, JobPreempted) for event in events)


@pytest.mark.faults
def test_run_when_ranks_die_then_every_job_ends_once_with_the_same_bytes(data, expected, tmp_path):
    lives = iter([60, 90, 40])
    states, events = train(run_spec(max_jobs=2), data, tmp_path / "out", 2, life=lambda index: next(lives, 10**9))
    assert states == FINAL
    assert_same(tmp_path / "out", expected, events)
    died = [event.message for event in events if isinstance(event, JobWarning)]
    assert any(message.startswith("replica ") and " vanished; " in message for message in died)


def test_run_when_ranks_die_in_the_middle_of_a_write_then_nothing_half_written_is_left(
    data, expected, tmp_path, monkeypatch
):
    lives, vanish = iter([60, 90, 40]), ReplicatedEngine._replace

    def leave_half(self: ReplicatedEngine, rank: RankRecord, how: str) -> None:
        for job in self.jobs.values():
            if job.rank == rank.index:
                half = tmp_path / "out" / job.name / "checkpoints" / f"{TEMP_PREFIX}half"
                half.mkdir(parents=True)
                (half / "tensors.safetensors").write_bytes(b"half of")
                left.append(half)
        vanish(self, rank, how)

    left: list[Path] = []
    monkeypatch.setattr(ReplicatedEngine, "_replace", leave_half)
    states, events = train(run_spec(max_jobs=2), data, tmp_path / "out", 2, life=lambda index: next(lives, 10**9))
    assert states == FINAL
    assert_same(tmp_path / "out", expected, events)
    assert left


@pytest.mark.faults
def test_run_when_ranks_die_while_jobs_are_dealt_out_at_random_then_changes_no_bit(
    data, expected, tmp_path, monkeypatch
):
    rng = random.Random(5)
    monkeypatch.setattr(rank_group, "MAX_RESTARTS", 50)
    monkeypatch.setattr(replicated_engine, "decide", dealing(rng))
    states, events = train(
        run_spec(), data, tmp_path / "out", 3, reassign, life=lambda index: 60 + int(rng.expovariate(1 / 200))
    )
    assert states == FINAL
    assert_same(tmp_path / "out", expected, events)


def test_run_when_stopped_again_and_again_and_resumed_over_other_ranks_then_changes_no_bit(data, expected, tmp_path):
    """Each session ends after a few steps; the last ones go on with what others left."""
    out, everything = tmp_path / "out", []
    for session, num_ranks in enumerate((2, 3, 0, 1, 2, 3, 2, 2, 2, 2)):
        steps = 0

        def stop_soon(engine: Any, event: Event, session: int = session) -> None:
            nonlocal steps
            steps += isinstance(event, StepDone)
            if steps >= 3 + 2 * session:
                engine.stop()

        states, events = train(run_spec(), data, out, num_ranks, stop_soon)
        everything += events
        if all(state.is_final for state in states.values()):
            break
        assert {"paused", "queued"} & {str(state) for state in states.values()}
    else:
        pytest.fail("it never ended")
    assert session >= 3
    assert_same(out, expected, everything)


def fill_disk_once(monkeypatch: pytest.MonkeyPatch, is_due: Callable[[Path], bool]) -> None:
    """The disk is full for the first file or directory that is to appear at such a path, in whichever thread."""
    failed: list[Path] = []

    def failing(operation: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            if not failed and is_due(Path(target)):
                failed.append(Path(target))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            operation(source, target, **options)

        return rename

    monkeypatch.setattr(os, "replace", failing(os.replace))
    monkeypatch.setattr(os, "rename", failing(os.rename))


@pytest.mark.faults
@pytest.mark.parametrize("file", ["checkpoint", "status"])
def test_run_when_the_disk_is_full_for_one_job_then_the_others_take_its_seat(
    data, expected, tmp_path, monkeypatch, file
):
    """There is one seat on each rank, so a paused job must leave it."""
    out = tmp_path / "out"
    saved = out / "dropout" / "checkpoints" / "step-00000003"

    def is_due(path: Path) -> bool:
        return path == saved if file == "checkpoint" else path == out / "dropout" / "status.json" and saved.exists()

    fill_disk_once(monkeypatch, is_due)
    states, events = train(run_spec(max_jobs=1), data, out, 2)
    assert states == {**FINAL, "dropout": "paused"}
    states, more = train(run_spec(max_jobs=1), data, out, 2)
    assert_same(out, expected, [*events, *more])


@pytest.mark.faults
def test_run_when_a_job_that_is_to_move_cannot_be_saved_then_it_is_paused_and_nothing_waits_for_it(
    data, expected, tmp_path, monkeypatch
):
    """It keeps what it has in memory where it is; the others are placed as before."""
    moving: list[str] = []
    pause = JobTransitions.pause

    def note_move(self: JobTransitions, jobs: Sequence[LiveJob], reason: Reason | None, **options: Any) -> list[Event]:
        if reason is None and not moving and jobs[0].name != DIVERGES and jobs[0].status.has_started:
            moving.append(jobs[0].name)
        return pause(self, jobs, reason, **options)

    monkeypatch.setattr(replicated_engine, "decide", dealing(random.Random(3)))
    monkeypatch.setattr(JobTransitions, "pause", note_move)
    fill_disk_once(monkeypatch, lambda path: path.parent.name == "checkpoints" and path.parent.parent.name in moving)
    states, events = train(run_spec(), data, tmp_path / "out", 2, reassign)
    assert states == {**FINAL, moving[0]: "paused"}
    _, more = train(run_spec(), data, tmp_path / "out", 3, reassign)
    assert_same(tmp_path / "out", expected, [*events, *more])


def test_run_when_one_rank_runs_out_of_memory_then_only_that_one_has_smaller_microbatches(
    data, expected, tmp_path, monkeypatch
):
    loaded: list[Any] = []

    def load(*args: Any) -> Any:
        backbone, notes = load_within(*args)
        launch = backbone.launch

        def small(batch: Any, row_tile: Any) -> Any:
            if batch.num_tokens > 48:
                raise torch.OutOfMemoryError("no room")
            return launch(batch, row_tile)

        if not loaded:
            backbone.launch = small
        loaded.append(backbone)
        return backbone, notes

    monkeypatch.setattr(rank_module, "load_within", load)
    with RunDirectory.open(tmp_path / "out", resume=False) as directory, opened(run_spec(), data, 2) as (run, pool):
        events: list[Event] = []
        execute_run(run, directory, on_event=events.append)
        capacities = sorted(rank.rank.engine.limits.capacity for rank in pool.started)
    assert capacities == [48, 96]
    assert [e for e in events if isinstance(e, JobWarning) and "ran out of memory" in e.message]
    assert_same(tmp_path / "out", expected, events)


def test_job_when_its_data_has_changed_since_it_was_checked_then_it_alone_fails(data, expected, tmp_path):
    """Mended, it is trained when the run is resumed."""
    write_data(tmp_path)
    out = tmp_path / "out"
    with RunDirectory.open(out, resume=False) as directory, opened(run_spec(), tmp_path, 2) as (run, _):
        (tmp_path / "double.jsonl").write_text("{not json\n")
        events: list[Event] = []
        states = execute_run(run, directory, on_event=events.append)
    assert states == {**FINAL, "rare": "failed"}
    assert "double.jsonl line 1" in str(run.engine.jobs["rare"].reason)
    assert Counter(event.job for event in events if isinstance(event, JobEnded)) == Counter(NAMES)
    write_data(tmp_path)
    states, _ = train(run_spec(), tmp_path, out, 2)
    assert states["rare"] == "succeeded"
    for name in NAMES:
        assert files_of(out, name) == expected[name], name


def test_rank_when_its_device_fails_then_its_own_words_are_reported_and_it_is_replaced(
    data, expected, tmp_path, monkeypatch
):
    broken: list[bool] = []

    def load(*args: Any) -> Any:
        backbone, notes = load_within(*args)
        if not broken:
            broken.append(True)
            backbone.launch = fault
        return backbone, notes

    def fault(*_: object) -> None:
        raise ReplicaFaultError("the GPU has fallen off the bus")

    monkeypatch.setattr(rank_module, "load_within", load)
    states, events = train(run_spec(), data, tmp_path / "out", 2)
    assert states == FINAL
    assert_same(tmp_path / "out", expected, events)
    (message,) = [event.message for event in events if isinstance(event, JobWarning)]
    assert "fallen off the bus; its jobs go on from their last checkpoints" in message


@pytest.mark.faults
def test_rank_when_it_gives_no_sign_of_life_then_it_is_ended_and_replaced_while_others_talk(data, tmp_path):
    """On a model whose steps take so long that jobs are still under way when the rank stalls."""
    spec = dataclasses.replace(run_spec(), base_model="tiny")
    train(spec, data, tmp_path / "alone", 0)
    stalled: list[Any] = []

    def stall(engine: Any, event: Event) -> None:
        if isinstance(event, StepDone) and not stalled:
            rank = engine.jobs[event.job].rank
            stalled.append(engine._ranks[rank].process)
            stalled[0].theirs.is_stalled.set()

    states, events = train(spec, data, tmp_path / "out", 2, stall, silent_s=1.0)
    assert states == FINAL
    assert_same(tmp_path / "out", {name: files_of(tmp_path / "alone", name) for name in NAMES}, events)
    assert not stalled[0].thread.is_alive()
    assert any("gave no sign of life for 1 s" in e.message for e in events if isinstance(e, JobWarning))


@pytest.mark.faults
def test_run_when_ranks_die_as_soon_as_they_are_there_then_ends_with_a_sentence(data, tmp_path):
    """No job waits for a rank that will never come."""
    with pytest.raises(JobError, match=r"no replica is left: the last one vanished\. Every job goes on"):
        train(run_spec(), data, tmp_path / "out", 2, life=lambda index: 2)


def test_run_when_a_rank_does_not_see_the_run_directory_then_fails_before_any_training(data, tmp_path, monkeypatch):
    def elsewhere(path: Path, rank: int, owner: Owner, permit: Path) -> RankDirectory:
        return RankDirectory(tmp_path / "other" if rank == 1 else path, rank, owner, permit)

    monkeypatch.setattr(rank_module, "RankDirectory", elsewhere)
    with pytest.raises(StorageError, match=r"other: rank 1 on .* does not find the run of process \d+ .* share\."):
        train(run_spec(), data, tmp_path / "out", 2)
    assert not list((tmp_path / "out").glob("*/metrics.jsonl"))


def test_job_when_it_does_not_fit_then_the_sentence_of_the_rank_is_raised(data, tmp_path):
    odd = JobSpec("odd", ("upper.jsonl",), adapter=AdapterSpec(r=5000), max_length=48)
    spec = dataclasses.replace(run_spec(), jobs=(*run_spec().jobs, odd))
    with pytest.raises(ConfigError, match=r"jobs\.5\.adapter\.r") as alone, opened(spec, data, 0):
        pass
    with pytest.raises(ConfigError) as over_ranks, opened(spec, data, 2):
        pass
    assert str(over_ranks.value) == str(alone.value)


def test_job_when_it_compares_with_a_reference_then_placement_counts_what_that_takes(tmp_path):
    """The controller holds no replica: it knows what a rank has counted."""
    row = {"prompt": "warp\n", "chosen": "WARP", "rejected": "warp"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(row) + "\n") * 4)
    pairs = JobSpec("pairs", ("pairs.jsonl",), objective="dpo", adapter=AdapterSpec(r=4), max_length=48, max_steps=1)
    spec = dataclasses.replace(run_spec(), jobs=(pairs,))
    with opened(spec, tmp_path, 0) as (alone, _), opened(spec, tmp_path, 1) as (over_ranks, _):
        job = alone.engine.jobs["pairs"]
        assert job.reference_bytes > 0
        there = over_ranks.engine.jobs["pairs"]
        assert there.applicant.num_bytes == alone.engine.bytes_of(job)
        assert there.inputs == job.inputs and there.inputs["data"], "a resumed run compares them before ranks start"
