"""Writes what must outlive the process: metrics and status itself, checkpoints and adapters through the executor.

`JobFiles` tracks the files that are written while training continues.

A job is not continued on other inputs than its checkpoint's: another backbone, other data or adapters. A checkpoint
records digests of them. One that an earlier version wrote has fewer, and what it lacks is not compared.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from weft.engine.events import EvalDone, Event, JobWarning, StepDone
from weft.engine.execute.protocol import (
    AdapterWork,
    CheckpointWork,
    Executor,
    ReplicaFaultError,
    StateWork,
    Ticket,
    Worker,
)
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.room import CapacityLimit
from weft.engine.timeline import TimelineRecorder
from weft.errors import CheckpointError, ConfigError, DataError
from weft.plan.cost.memory import FLOAT_BYTES, best_bytes, kept_bytes
from weft.store.atomic import write_file
from weft.store.checkpoint import latest_checkpoint
from weft.store.run_dir import RunDirectory
from weft.store.wall_clock import Activity, TimeSplit, WallClock

NOTE_TIME_S = 30.0
"""Least seconds between two writes of time.json during training."""
ExportTo = Callable[[str, int], Path | None]
"""Maps a job and the step of a checkpoint to the path of its adapter; None: no export."""


class RunRecorder:
    def __init__(self, executor: Executor, room: CapacityLimit, wall: WallClock) -> None:
        self.run_dir: RunDirectory | None = None
        self._wall = wall
        self._time_due_s = 0.0
        """Time of the next write of time.json, by `time.perf_counter`."""
        self.files = JobFiles(executor)
        self.export_to: ExportTo = lambda job, step: None
        self._executor = executor
        self.room = room
        self._elapsed: dict[str, float] = {}
        self._unwritten: dict[str, deque[dict[str, Any]]] = {}

    def keep_in(self, directory: RunDirectory) -> None:
        """Writes there from now on, and continues from what it holds."""
        self.run_dir = directory
        self._wall.go_on_from(directory.read_time())

    @property
    def time_split(self) -> TimeSplit:
        return self._wall.of_run()

    @property
    def environment(self) -> dict[str, Any]:
        """Everything besides a job that decides the bits of its result."""
        return {**self._executor.facts.environment, **self.room.conditions()}

    def open(self, job: LiveJob) -> Iterator[Event]:
        """Restores a job from its newest good checkpoint, if any; yields why newer ones were rejected."""
        if self.run_dir is None:
            return
        name = job.spec.name
        # Lines of steps that are not on disk, or will be taken again.
        self._unwritten.pop(name, None)
        checkpoint, rejected = latest_checkpoint(self.run_dir.checkpoints_dir(name))
        for reason in rejected:
            yield JobWarning((name,), f"checkpoint rejected: {reason}")
        if checkpoint is None:
            self.run_dir.truncate_metrics(name, 0)
            return
        check_backbone(checkpoint.environment, self.environment, name)
        check_inputs(checkpoint.state, job.inputs, name)
        state = self._executor.wait(self._executor.start(StateWork(job.name)))
        shapes = {name: tensor.shape for name, tensor in state.items() if name.startswith("params")}
        if {n: t.shape for n, t in checkpoint.tensors.items() if n.startswith("params")} != shapes:
            raise CheckpointError("the checkpoint's adapter has another shape than the job's.", where=name)
        # Without these entries it was trained on unquantised weights, with the first masks, on undivided layers.
        before = {"quantize": "none", "masks": 1, "tensor": 1, **checkpoint.environment}
        if self.room.adopt(checkpoint.state.get("asked_capacity"), checkpoint.environment.get("capacity")):
            yield JobWarning((name,), f"goes on with a capacity of {self.room.capacity}: more ran out of memory before")
        if job.spec.adapter.lora_dropout and before["masks"] != self.environment["masks"]:
            yield JobWarning((name,), "was begun with dropout masks of another version: it goes on, but ends otherwise")
        now = {"tensor": 1, **self.environment}
        changed = [k for k, v in now.items() if before.get(k) != v and k not in ("masks", *MODEL_FILES)]
        if changed:
            was = ", ".join(f"{k} {before.get(k)} -> {now[k]}" for k in changed)
            yield JobWarning((name,), f"resumed under other conditions ({was}): equal to about 1e-5, not to the bit")
        job.progress.restore(checkpoint.step, checkpoint.state)
        self._executor.restore(name, checkpoint.tensors)
        self._elapsed[name] = checkpoint.state["elapsed_s"]
        self.run_dir.truncate_metrics(name, checkpoint.step)

    def elapsed_s(self, job: LiveJob) -> float:
        """Seconds of the run at the job's restored checkpoint."""
        return self._elapsed.get(job.spec.name, 0.0)

    def start_checkpoint(self, job: LiveJob, elapsed_s: float) -> None:
        """Starts to write a checkpoint of a job at its step boundary, with an export of its adapter if wanted. Waits
        until the job's last one is written, so that a slow disk slows down only the jobs that write to it."""
        if self.run_dir is None:
            return
        self.files.wait_for_slot(job)
        export = self.export_to(job.name, job.step)
        if export is not None:
            self.files.start(job, FileKind.EXPORT, AdapterWork(job.name, export, best=False, step=job.step))
        work = CheckpointWork(
            job.name,
            directory=self.run_dir.checkpoints_dir(job.name),
            step=job.step,
            state={
                **job.progress.counters(owes_eval=job.is_eval_due()),
                "elapsed_s": elapsed_s,
                "asked_capacity": self.room.requested,
            },
            environment=self.environment,
            keep=job.spec.save_total_limit,
        )
        self.files.start(job, FileKind.CHECKPOINT, work)

    def start_adapter(self, job: LiveJob) -> bool:
        """Starts to write the adapter of a job that has ended; False if nothing is written at all."""
        if self.run_dir is None:
            return False
        directory = self.run_dir.adapter_dir(job.name)
        self.files.start(job, FileKind.ADAPTER, AdapterWork(job.name, directory, best=True))
        return True

    def note_step(self, job: LiveJob, event: StepDone) -> None:
        """Queues a training line for metrics.jsonl; `flush` writes it."""
        if self.run_dir is None or (event.step % job.spec.logging_steps and event.step != event.num_steps):
            return
        self._note(job, {**_line(event), "skipped": True} if event.skipped else _line(event))

    def note_eval(self, job: LiveJob, event: EvalDone) -> None:
        self._note(job, _line(event))

    def flush(self, job: LiveJob) -> None:
        """Writes queued lines; on an error the rest stays queued."""
        lines = self._unwritten.get(job.spec.name)
        if self.run_dir is None or not lines:
            return
        with self._wall.spending(Activity.WRITING):
            while lines:
                self.run_dir.append_metrics(job.spec.name, lines[0])
                lines.popleft()

    def _note(self, job: LiveJob, record: dict[str, Any]) -> None:
        if self.run_dir is not None:
            self._unwritten.setdefault(job.spec.name, deque()).append(record)

    def write_status(self, job: LiveJob, elapsed_s: float, *, can_retry: bool = False) -> None:
        if self.run_dir is None:
            return
        with self._wall.spending(Activity.WRITING):
            self.run_dir.write_status(
                job.spec.name,
                job.state,
                reason=job.reason,
                step=job.step,
                num_steps=job.num_steps,
                trained_tokens=job.num_tokens,
                skipped_steps=job.progress.num_skipped,
                best_eval_loss=job.best_eval,
                early_stopped=job.progress.stopped_early,
                seconds=elapsed_s,
                **({"can_retry": True} if can_retry else {}),
            )

    def write_timeline(self, timeline: TimelineRecorder) -> None:
        if self.run_dir is None:
            return
        with self._wall.spending(Activity.WRITING):
            write_file(self.run_dir.timeline_path, timeline.to_json())
        self.run_dir.write_time(self.time_split)

    def note_time(self) -> None:
        """Writes time.json if it is old, so that a killed process loses little of it."""
        if self.run_dir is not None and time.perf_counter() >= self._time_due_s:
            self._time_due_s = time.perf_counter() + NOTE_TIME_S
            with self._wall.spending(Activity.WRITING):
                self.run_dir.write_time(self.time_split)


_NOT_IN_LINES = ("job", "num_steps", "tokens", "skipped", "is_best", "metrics")


def _line(event: StepDone | EvalDone) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    values = {name: value for name, value in event.fields().items() if name not in _NOT_IN_LINES}
    return {"time" if name == "seconds" else name: value for name, value in values.items()}


SNAPSHOT_SHARE = 8
"""All snapshots together take at most one part in so many of the machine's memory, unless one alone takes more."""


class FileKind(Enum):
    CHECKPOINT = "checkpoint"
    EXPORT = "export"
    ADAPTER = "adapter"


@dataclass
class JobFile:
    job: LiveJob
    kind: FileKind
    step: int
    directory: Path
    ticket: Ticket[None]
    started_s: float
    ended_s: float = 0.0
    error: Exception | None = None


class JobFiles:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._room_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SNAPSHOT_SHARE
        self._under_way: list[JobFile] = []
        self._ended: list[JobFile] = []

    @property
    def is_writing(self) -> bool:
        """True if a write is under way, or has ended and is not taken."""
        return bool(self._under_way or self._ended)

    def start(self, job: LiveJob, kind: FileKind, work: CheckpointWork | AdapterWork) -> None:
        ticket = self._worker.start(work)
        self._under_way.append(JobFile(job, kind, job.step, work.directory, ticket, time.perf_counter()))

    def wait_for_slot(self, job: LiveJob) -> None:
        """Waits until a job has no write under way, and those of others leave memory for its snapshot."""
        self._wait([file for file in self._under_way if file.job is job])
        room = self._room_bytes - _snapshot_bytes(job)
        while self._under_way and sum(_snapshot_bytes(file.job) for file in self._under_way) > room:
            self._wait(self._under_way[:1])

    def ended(self) -> list[JobFile]:
        self._wait([file for file in self._under_way if self._worker.is_written(file.ticket)])
        ended, self._ended = self._ended, []
        return ended

    def wait_for_one(self) -> list[JobFile]:
        self._wait(self._under_way[:1])
        return self.ended()

    def finish(self, job: LiveJob) -> list[JobFile]:
        self._wait([file for file in self._under_way if file.job is job])
        found = [file for file in self._ended if file.job is job]
        self._ended = [file for file in self._ended if file.job is not job]
        return found

    def finish_all(self) -> None:
        self._wait(list(self._under_way))

    def _wait(self, files: list[JobFile]) -> None:
        for file in files:
            self._under_way.remove(file)
            try:
                self._worker.wait(file.ticket)
            except ReplicaFaultError:
                raise
            except Exception as error:  # whatever it is, it is this job's alone
                file.error = error
            file.ended_s = time.perf_counter()
            self._ended.append(file)


def _snapshot_bytes(job: LiveJob) -> int:
    each = FLOAT_BYTES + kept_bytes(job.spec) + best_bytes(job.spec)
    return math.ceil(each * job.num_parameters)


MODEL_FILES = ("chat_template", "tokenizer", "config", "weights")
"""Entries of an environment that are digests of a base model's files."""


def environment_difference(
    here: Mapping[str, Any], there: Mapping[str, Any], model: str, first: str, where: str
) -> ConfigError | None:
    """Error if results would depend on which of two processes computes them, else None; `first`: the process of
    `here`."""
    for name in here:
        if here[name] == there.get(name):
            continue
        if name in MODEL_FILES:
            found = f"has another {name.replace('_', ' ')} of {model} than {first}"
            return ConfigError(f"{found}; all machines need the same files.", where=where)
        found = f"has {name} {there.get(name)}, {first} {here[name]}; results would differ in their last bits"
        return ConfigError(f"{found}. Use devices that are alike.", where=where)
    return None


def check_backbone(was: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """CheckpointError if the environment of a checkpoint has another backbone than the environment `now`."""
    # Without this entry it was trained on unquantised weights.
    was = {"quantize": "none", **was}
    for setting in ("quantize", "dtype"):
        if was.get(setting, now[setting]) != now[setting]:
            found = f"was trained with {setting} {was[setting]}, the backbone is loaded with {now[setting]}"
            raise CheckpointError(f"the checkpoint {found}; a resumed job keeps its backbone.", where=where)
    for name in MODEL_FILES:
        if name in was and name in now and was[name] != now[name]:
            # Without the model's name: a service's tenant may read this, and the name may be a path.
            found = f"the base model has changed since the run began ({name.replace('_', ' ')})"
            raise CheckpointError(f"{found}; put it back, or start a new run.", where=where)


def check_inputs(was: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """DataError or CheckpointError if the state of a checkpoint has other inputs than `JobProgress.inputs` now."""
    if was["data"] != now["data"]:
        raise DataError("train_data is not what the checkpoint was trained on; start a new run.", where=where)
    if "eval_data" in was and was["eval_data"] != now.get("eval_data"):
        raise DataError("eval_data is not what the run began with; put that back, or start a new run.", where=where)
    if was.get("reference") != now.get("reference"):
        found = "the adapter that the job compares with is not the one its checkpoint was trained with"
        raise CheckpointError(f"{found}; put that back, or start a new run.", where=where)
    adapters = was.get("adapter", {}), now.get("adapter", {})
    changed = [name for name in adapters[0].keys() & adapters[1].keys() if adapters[0][name] != adapters[1][name]]
    if changed:
        found = f"init_adapter has another {min(changed)} than when the run began"
        raise CheckpointError(f"{found}; put that adapter back, or start a new run.", where=where)
