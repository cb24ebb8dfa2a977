"""Writes what must outlive the process: metrics and status itself, checkpoints and adapters through the executor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.dataset import JobData
from weft.engine.capacity import CapacityLimit
from weft.engine.events import EvalDone, Event, JobWarning, StepDone
from weft.engine.execute.protocol import AdapterWork, CheckpointWork, Executor, StateWork
from weft.engine.job_files import FileKind, JobFiles
from weft.engine.jobs.live_job import LiveJob
from weft.engine.timeline import TimelineRecorder
from weft.errors import CheckpointError, DataError
from weft.store.atomic import write_file
from weft.store.checkpoint import Checkpoint, latest_checkpoint
from weft.store.run_dir import RunDirectory
from weft.wall_clock import Activity, TimeSplit, WallClock

if TYPE_CHECKING:
    import torch


NOTE_TIME_S = 30.0
"""Least seconds from one writing of time.json to the next while training goes on; it is written with a checkpoint."""
ExportTo = Callable[[str, int], Path | None]
"""Where the adapter of a job goes at the checkpoint of a step; None if nowhere."""


class RunRecorder:
    """Writes what must outlive the process, job by job."""

    def __init__(self, executor: Executor, room: CapacityLimit, wall: WallClock) -> None:
        self.run_dir: RunDirectory | None = None
        self._wall = wall
        self._time_due_s = 0.0
        """When time.json is to be written again, by `time.perf_counter`."""
        self.files = JobFiles(executor)
        self.export_to: ExportTo = lambda job, step: None
        self._executor = executor
        self.room = room
        self._elapsed: dict[str, float] = {}
        self._unwritten: dict[str, deque[dict[str, Any]]] = {}
        """Metrics that are not on disk yet, by job, oldest first."""

    def keep_in(self, directory: RunDirectory) -> None:
        """Writes there from now on, and goes on from what is there."""
        self.run_dir = directory
        self._wall.go_on_from(directory.read_time())

    @property
    def time_split(self) -> TimeSplit:
        """Where the wall clock of the run went so far, over all its sessions."""
        return self._wall.of_run()

    @property
    def environment(self) -> dict[str, Any]:
        """What besides a job decides the bits of its result now."""
        return {**self._executor.facts.environment, **self.room.conditions()}

    def open(self, job: LiveJob) -> Iterator[Event]:
        """Restores a job from its newest good checkpoint, if it has one; says what was wrong with newer ones."""
        if self.run_dir is None:
            return
        name = job.spec.name
        # Of steps that are not on disk, or will be taken again.
        self._unwritten.pop(name, None)
        checkpoint, rejected = latest_checkpoint(self.run_dir.checkpoints_dir(name))
        for reason in rejected:
            yield JobWarning((name,), f"checkpoint rejected: {reason}")
        if checkpoint is None:
            self.run_dir.truncate_metrics(name, 0)
            return
        check_data(checkpoint, job.data, name)
        if checkpoint.state.get("reference") != job.progress.reference:
            found = "the adapter that the job compares with is not the one its checkpoint was trained with"
            raise CheckpointError(f"{found}; start a new run.", where=name)
        shapes = {name: tensor.shape for name, tensor in self._state(job).items() if name.startswith("params")}
        if {n: t.shape for n, t in checkpoint.tensors.items() if n.startswith("params")} != shapes:
            raise CheckpointError("the checkpoint's adapter has another shape than the job's.", where=name)
        # A checkpoint that does not say so was trained on weights as they are, and with the first masks.
        before = {"quantize": "none", "masks": 1, "tensor": 1, **checkpoint.environment}
        if before["quantize"] != self.environment["quantize"]:
            raise CheckpointError(
                f"the checkpoint was trained with quantize {before['quantize']}, the backbone is loaded with "
                f"{self.environment['quantize']}; a resumed job keeps its backbone.",
                where=name,
            )
        if self.room.adopt(checkpoint.state.get("asked_capacity"), checkpoint.environment.get("capacity")):
            yield JobWarning((name,), f"goes on with a capacity of {self.room.capacity}: more ran out of memory before")
        if job.spec.adapter.lora_dropout and before["masks"] != self.environment["masks"]:
            yield JobWarning((name,), "was begun with dropout masks of another version: it goes on, but ends otherwise")
        now = {"tensor": 1, **self.environment}
        changed = [k for k, v in now.items() if before.get(k) != v and k != "masks"]
        if changed:
            was = ", ".join(f"{k} {before.get(k)} -> {now[k]}" for k in changed)
            yield JobWarning((name,), f"resumed under other conditions ({was}): equal to about 1e-5, not to the bit")
        job.progress.restore(checkpoint.step, checkpoint.state)
        self._executor.restore(name, checkpoint.tensors)
        self._elapsed[name] = checkpoint.state["elapsed_s"]
        self.run_dir.truncate_metrics(name, checkpoint.step)

    def elapsed_s(self, job: LiveJob) -> float:
        """Seconds the run had taken when the job's checkpoint was written."""
        return self._elapsed.get(job.spec.name, 0.0)

    def start_checkpoint(self, job: LiveJob, elapsed_s: float) -> None:
        """Starts to write a checkpoint of a job at its step boundary, and its adapter beside it where that is wanted.

        It waits until the job's last one is written, so that a slow disk slows those down who write to it.
        """
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
            state={**job.progress.counters(), "elapsed_s": elapsed_s, "asked_capacity": self.room.asked},
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
        """Keeps a training line for metrics.jsonl; `flush` writes it."""
        if self.run_dir is None or (event.step % job.spec.logging_steps and event.step != event.num_steps):
            return
        record = {
            "step": event.step,
            "epoch": event.epoch,
            "loss": event.loss,
            "mean_token_accuracy": event.mean_token_accuracy,
            "grad_norm": event.grad_norm,
            "learning_rate": event.learning_rate,
            "num_tokens": event.num_tokens,
            "time": event.seconds,
            **event.metrics,
        }
        self._note(job, {**record, "skipped": True} if event.skipped else record)

    def note_eval(self, job: LiveJob, event: EvalDone) -> None:
        """Keeps an evaluation line for metrics.jsonl; `flush` writes it."""
        record = {
            "step": event.step,
            "epoch": event.epoch,
            "eval_loss": event.eval_loss,
            "eval_mean_token_accuracy": event.eval_mean_token_accuracy,
            "eval_runtime": event.eval_runtime,
            "time": event.seconds,
            **event.metrics,
        }
        self._note(job, record)

    def flush(self, job: LiveJob) -> None:
        """Writes the lines kept so far; those that cannot be written stay for the next time."""
        lines = self._unwritten.get(job.spec.name)
        if self.run_dir is None or not lines:
            return
        with self._wall.spending(Activity.WRITING):
            while lines:
                self.run_dir.append_metrics(job.spec.name, lines[0])
                lines.popleft()

    def _state(self, job: LiveJob) -> dict[str, torch.Tensor]:
        return self._executor.wait(self._executor.start(StateWork(job.name)))

    def _note(self, job: LiveJob, record: dict[str, Any]) -> None:
        if self.run_dir is not None:
            self._unwritten.setdefault(job.spec.name, deque()).append(record)

    def write_status(self, job: LiveJob, elapsed_s: float) -> None:
        """Says on disk where the job stands."""
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
            )

    def export_adapter(self, job: LiveJob, directory: Path) -> None:
        """Writes the job's adapter as it is now, and waits for it."""
        self._executor.wait(self._executor.start(AdapterWork(job.name, directory, best=False)))

    def write_timeline(self, timeline: TimelineRecorder) -> None:
        """Writes timeline.json for the report and for Perfetto, and time.json."""
        if self.run_dir is None:
            return
        with self._wall.spending(Activity.WRITING):
            write_file(self.run_dir.timeline_path, timeline.to_json())
        self.run_dir.write_time(self.time_split)

    def note_time(self) -> None:
        """Writes time.json if it is old, so that little is missing from it if the process is killed."""
        if self.run_dir is not None and time.perf_counter() >= self._time_due_s:
            self._time_due_s = time.perf_counter() + NOTE_TIME_S
            with self._wall.spending(Activity.WRITING):
                self.run_dir.write_time(self.time_split)


def check_data(checkpoint: Checkpoint, data: JobData, where: str) -> None:
    """Refuses training data that is not what a checkpoint was trained on."""
    if checkpoint.state["data"] != data.train.fingerprint:
        found = "train_data, or the chat template, is not what the checkpoint was trained on"
        raise DataError(f"{found}; start a new run.", where=where)
