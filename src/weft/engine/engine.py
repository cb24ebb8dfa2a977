"""Executes programs on a backbone, for jobs that come and go.

`submit`, `cancel`, `pause` and `resume` may be called at any time, from any thread and between events; they take effect
at the next step boundary. The backbone is never reloaded and no other job notices. Jobs without room wait, or give way
to a higher priority and go on later; no result depends on it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from weft.backbone.backbone import Backbone
from weft.backbone.load import load_backbone
from weft.backbone.out_of_memory import memory_errors
from weft.cost.rows import capacities
from weft.data.dataset import JobData
from weft.engine.capacity import NO_ROOM, OUT_OF_MEMORY, CapacityLimit, release_memory, too_long
from weft.engine.evaluate import evaluate_due
from weft.engine.events import (
    EvalDone,
    Event,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobPreempted,
    JobResumed,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    JobWarning,
    StepDone,
)
from weft.engine.live_job import LiveJob
from weft.engine.placement import Placement
from weft.engine.prepare_job import prepare_job
from weft.engine.program_run import LookaheadPlanner, ProgramRun
from weft.engine.recorder import RunRecorder
from weft.engine.timeline import TimelineRecorder
from weft.errors import CheckpointError, ConfigError, DataError, JobError, StorageError
from weft.job_state import JobState, Reason, ReasonCode
from weft.plan.pack import pack
from weft.plan.program import Planner
from weft.plan.types import Limits
from weft.spec import BackboneSpec, JobSpec
from weft.spec.run import Capacity
from weft.store.run_dir import RunDirectory, RunRecord

RUN_STOPPED = Reason(ReasonCode.RUN_STOPPED, "the run was stopped")
LESS_WAS_FREE = Reason(ReasonCode.NO_MEMORY_NOW, "waits for memory: less was free than its adapter takes")


@dataclass(frozen=True)
class _Command:
    """Something a user asked for, to be done at the next step boundary."""

    action: Literal["start", "cancel", "pause", "resume"]
    job: str


class Engine:
    """Trains any number of jobs together on one backbone."""

    def __init__(
        self,
        backbone: Backbone | BackboneSpec | str,
        *,
        capacity: Capacity = "auto",
        longest: int = 0,
        planner: Planner = pack,
        max_jobs: int | None = None,
        job_memory: int | None = None,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        """Nothing is written until `keep_in` names a directory; read results from `adapter_of`.

        A microbatch has at most `capacity` tokens; auto: what suits the device and holds a sample of `longest`. At most
        `max_jobs` train at a time, and their adapters with optimizers take at most `job_memory` bytes. Default: as many
        as there is room for on a GPU; all of them on a CPU. When not all fit, tenants get tokens by weight.
        """
        if isinstance(backbone, str):
            backbone = BackboneSpec(backbone)
        self.backbone = load_backbone(backbone) if isinstance(backbone, BackboneSpec) else backbone
        self.jobs: dict[str, LiveJob] = {}
        self.timeline = TimelineRecorder()
        self.planner = planner
        self.max_jobs = max_jobs
        self._room = CapacityLimit(self.backbone, capacities(capacity, self.backbone.device.type, longest), self.jobs)
        self._places = Placement(
            self.backbone, self.jobs, max_jobs=max_jobs, job_memory=job_memory, weights=tenant_weights or {}
        )
        self._plans = LookaheadPlanner(planner, self.timeline)
        self._keeper = RunRecorder(self.backbone, self._room)
        self._commands: deque[_Command] = deque()
        self._untold: deque[Event] = deque()
        """Steps that are done and not yet told."""
        self._stretch: ProgramRun | None = None
        """The last one; a microbatch of it may still run."""
        self._is_within = False
        """Something is under way of which jobs have not been told; for good, if it is interrupted."""
        self._stopping = False

    @property
    def limits(self) -> Limits:
        """What a microbatch may hold now."""
        return self._room.limits

    @property
    def row_tile(self) -> int:
        """Rows every frozen product is computed in now."""
        return self._room.row_tile

    def submit(self, spec: JobSpec, data: JobData | None = None, *, base_dir: Path | str = ".") -> None:
        """Adds a job. Bad data or an adapter that does not fit raises here and changes nothing for the others.

        Paths are relative to `base_dir`. A job found in the run directory goes on from its last checkpoint.
        """
        if spec.name in self.jobs:
            raise ConfigError(f"there is already a job {spec.name!r}.", where="name")
        job = prepare_job(spec, data, self.backbone, self.limits.capacity, Path(base_dir))
        self._places.check(job, self._room.least(job.longest))
        self.jobs[spec.name] = job
        self._commands.append(_Command("start", spec.name))

    def keep_in(self, directory: RunDirectory | Path | str) -> None:
        """Writes metrics, checkpoints and adapters there, and goes on from what is there; call it before `events`."""
        if not isinstance(directory, RunDirectory):
            path = Path(directory)
            directory = RunDirectory.open(path, resume=(path / "run.json").exists())
            directory.write_run(RunRecord(run_name=path.resolve().name, base_model=self.backbone.name))
        self._keeper.run_dir = directory

    def cancel(self, name: str) -> None:
        """Takes a job off; its slot is free at the next step boundary."""
        self._command("cancel", name)

    def pause(self, name: str) -> None:
        """Keeps a job at its last step boundary; what has run of its next global batch is run again on resume."""
        self._command("pause", name)

    def resume(self, name: str) -> None:
        """Lets a paused job go on."""
        self._command("resume", name)

    def run(self) -> dict[str, LiveJob]:
        """Trains until nothing is left to do; returns all jobs by name."""
        for _ in self.events():
            pass
        return self.jobs

    def stop(self) -> None:
        """Pauses and saves every job at its last step boundary; `events` then ends. No finished step is lost."""
        self._stopping = True

    def events(self) -> Iterator[Event]:
        """Trains, and yields what happens as it happens; ends when no job can go on."""
        if self._is_within:
            raise JobError(
                "training was interrupted in the middle of a step, so what is in memory is no longer exact.",
                hint="Make a new engine; with the same run directory its jobs go on from their last checkpoints.",
            )
        yield from self._tell()
        while not self._stopping:
            yield from self._finish_stretch()
            while self._commands:
                # Done before it is told: a reader that leaves here must not leave half a command behind.
                yield from list(self._obey(self._commands.popleft()))
            yield from self._admit()
            for job in self._running():
                if job.settled_step != job.step:
                    yield from self._settle(job)
            running = self._running()
            if running:
                with self._places.watched():
                    yield from self._execute(running)
            elif not self._commands and not self._places.waiting():
                break
        yield from self._finish_stretch()
        if self._stopping:
            self._stopping = False
            preempted = [job for job in self._places.waiting() if job.has_started]
            for job in [*self._running(), *preempted]:
                yield from list(self._pause(job, RUN_STOPPED))
        try:
            self._keeper.write_timeline(self.timeline)
        except StorageError as error:
            yield JobWarning((), f"timeline: {error}")

    def adapter_of(self, name: str) -> dict[str, tuple[object, ...]]:
        """The adapter's tensors of a job by module path, as they are now; LoRA's are (A, B)."""
        return dict(self._job(name).adapter.tensors())

    def export_adapter(self, name: str, directory: Path | str) -> None:
        """Writes a job's adapter, as it is now, as a PEFT directory; its parent must exist."""
        self._keeper.export_adapter(self._job(name), Path(directory))

    def forget(self, name: str) -> None:
        """Lets go of a job that has ended, with its adapter and optimizer; what is on disk stays."""
        if not self._job(name).state.is_final:
            raise ConfigError(f"{name!r} has not ended; cancel it first.", where="name")
        # What was asked of it too late is not meant for the next job of this name.
        for command in [known for known in self._commands if known.job == name]:
            self._commands.remove(command)
        del self.jobs[name]

    def _running(self) -> list[LiveJob]:
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self.jobs.values()) if job.state is JobState.RUNNING]

    def _execute(self, running: list[LiveJob]) -> Iterator[Event]:
        """Plans the next stretch and runs it, until its end or until something changes who trains."""
        stretch = ProgramRun(self.backbone, running, self._plans, self.limits, self.row_tile, self.timeline)
        self._stretch = stretch
        while names := stretch.next_jobs():
            done: list[Event] | None = None
            self._is_within = True
            with contextlib.suppress(torch.OutOfMemoryError):
                done = stretch.advance()
            self._is_within = False
            if done is None:
                # Not in a handler, which would hold on to the tensors of what failed.
                yield from self._make_room(names)
                return
            for event in done:
                if isinstance(event, StepDone):
                    self._keeper.note_step(self.jobs[event.job], event)
            self._untold.extend(done)
            yield from self._tell()
            is_settled = all(job.state is JobState.RUNNING and job.settled_step == job.step for job in running)
            if self._stopping or self._commands or not is_settled:
                return

    def _finish_stretch(self) -> list[Event]:
        """Before anything else is decided: what has been started is counted."""
        stretch, self._stretch = self._stretch, None
        if stretch is None:
            return []
        self._is_within = True
        events = stretch.finish()
        self._is_within = False
        return events

    def _tell(self) -> Iterator[Event]:
        """Tells what has been done, and settles each step once it is told."""
        while self._untold:
            event = self._untold.popleft()
            yield event
            # A reader may have forgotten a job that failed before this was told.
            job = self.jobs.get(event.job) if isinstance(event, StepDone) else None
            if job is not None and job.state is JobState.RUNNING:
                yield from self._settle(job)

    def _make_room(self, names: Sequence[str]) -> list[Event]:
        """After the memory ran out: smaller microbatches; the jobs concerned go on from their last step.

        Jobs with a sample that fills a whole microbatch are in the way of smaller ones, so they fail.
        """
        for name in names:
            self.jobs[name].rewind()
        release_memory(self.backbone)
        self._places.ran_out()
        events: list[Event] = []
        before = self.limits.capacity
        if not self._room.shrink():
            for job in self._room.holders():
                reason = too_long(job.longest)
                events += [*self._leave(job, JobState.FAILED, reason), JobFailed(job.spec.name, job.step, reason)]
            self._room.shrink()
        if self._running() and self.limits.capacity < before:
            events.append(JobWarning(tuple(names), OUT_OF_MEMORY.format(before=before, now=self.limits.capacity)))
        return events

    def _settle(self, job: LiveJob) -> Iterator[Event]:
        """Does what the last step left to do: metrics, evaluation, checkpoint, and the end of the job.

        A disk that is full pauses the job; once resumed, it goes on with what was not done.
        """
        if job.diverged:
            remarks = self._leave(job, JobState.FAILED, job.diverged)
            yield from [*remarks, JobFailed(job.spec.name, job.step, job.diverged)]
            return
        has_room = True
        try:
            self._keeper.flush(job)
            if self._stretch is not None and (job.is_eval_due() or job.is_save_due()):
                self._stretch.wait()
            if job.is_eval_due():
                yield self._evaluate(job)
                self._keeper.flush(job)
            if job.is_save_due():
                with self.timeline.span("checkpoint", jobs={job.spec.name: 0}):
                    saved = list(self._keeper.save(job, self.timeline.now()))
                job.saved_step = job.step
                yield from saved
            if job.is_complete:
                yield from self._finish(job)
            job.settled_step = job.step
        except StorageError as error:
            # The weights in memory are good; what cannot go on is writing. The neighbours may write elsewhere.
            yield from list(self._pause(job, Reason.of(error), save=False))
        except torch.OutOfMemoryError:
            has_room = False
        if not has_room:
            # The job is not settled, so the evaluation is tried again.
            yield from self._make_room([job.spec.name])

    @memory_errors()
    def _evaluate(self, job: LiveJob) -> Event:
        """The evaluation of one job; all others that are due by now are done with it and told when it is their turn."""
        if not job.is_looked_at:
            others = [other for other in self._running() if other is not job and other.settled_step != other.step]
            due = [other for other in others if other.is_eval_due() and not (other.is_looked_at or other.diverged)]
            evaluate_due(self.backbone, [job, *due], self.limits.capacity, self.row_tile, self.timeline)
        looked = job.looked
        assert looked is not None
        is_best = job.record_eval(looked.means.loss)
        job.looked = None
        now_s = self.timeline.now()
        told = (looked.means.loss, looked.means.accuracy, looked.seconds)
        event = EvalDone(job.spec.name, job.step, job.epoch, *told, is_best, now_s)
        self._keeper.note_eval(job, event)
        return event

    def _finish(self, job: LiveJob) -> list[Event]:
        job.use_best()
        adapter_dir = self._keeper.write_adapter(job)
        remarks = self._leave(job, JobState.SUCCEEDED)
        job.settled_step = job.step
        return [*remarks, JobSucceeded(job.spec.name, job.step, adapter_dir, job.stopped_early)]

    def _leave(self, job: LiveJob, state: JobState, reason: Reason | None = None) -> list[Event]:
        """The job's slot becomes free for others; what cannot be written about that is only a warning."""
        self._places.take(job)
        job.state, job.reason = state, reason
        try:
            self._keeper.flush(job)
            self._keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            return [JobWarning((job.spec.name,), f"its end could not be recorded: {error}")]
        return []

    def _pause(self, job: LiveJob, reason: Reason | None, *, save: bool = True) -> Iterator[Event]:
        job.state, job.reason = JobState.PAUSED, reason
        job.rewind()
        try:
            # Before its first start, what is in memory is not the job's state; that may be on disk.
            if save and job.has_started:
                yield from self._keeper.save(job, self.timeline.now())
            self._keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            job.reason = Reason.of(error)
        self._places.take(job)
        yield JobPaused(job.spec.name, job.step, job.reason)

    def _obey(self, command: _Command) -> Iterator[Event]:
        """Carries out what a user asked for."""
        job = self.jobs[command.job]
        if job.state.is_final:
            return
        if command.action == "cancel":
            yield from self._leave(job, JobState.CANCELLED, Reason(ReasonCode.CANCELLED, "cancelled"))
            yield JobCancelled(job.spec.name, job.step)
        elif command.action == "pause" and job.state is not JobState.PAUSED:
            yield from self._pause(job, None)
        elif command.action == "resume" and job.state is JobState.PAUSED:
            job.state, job.reason, job.has_heard = JobState.QUEUED, None, False

    def _admit(self) -> list[Event]:
        """Does what admission decides: some jobs start or go on, some give way, the others hear why they wait."""
        if not self._places.waiting():
            return []
        events = self.fit_microbatches()
        with self.timeline.span("plan"):
            decision = self._places.decide(self.limits.capacity)
        for held in decision.refuse:
            job = self.jobs[held.job]
            events += [*self._leave(job, JobState.FAILED, held.reason), JobFailed(held.job, job.step, held.reason)]
        for held in decision.preempt:
            events += self._preempt(self.jobs[held.job], held.reason)
        for name in decision.start:
            events += self._start(self.jobs[name])
        for held in decision.wait:
            job = self.jobs[held.job]
            if not job.has_heard:
                job.has_heard = True
                events.append(JobWaiting(held.job, job.step, held.reason))
        return events

    def fit_microbatches(self) -> list[Event]:
        """Before any have run: smaller ones, where those asked for would leave too little memory for jobs."""
        said = None if self._running() else self._room.fit(self._places)
        names = tuple(job.spec.name for job in self._places.waiting())
        return [] if said is None else [JobWarning(names, said)]

    def shrink(self) -> bool:
        """Halves what a microbatch may hold; False if a sample is in the way."""
        return self._room.shrink()

    def _preempt(self, job: LiveJob, reason: Reason) -> Iterator[Event]:
        """Lets a job wait at its last step boundary, its state on the CPU."""
        job.state, job.reason, job.has_heard = JobState.QUEUED, reason, True
        self._places.take(job)
        try:
            self._keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            yield JobWarning((job.spec.name,), f"that it waits could not be recorded: {error}")
        yield JobPreempted(job.spec.name, job.step, reason)

    def _start(self, job: LiveJob) -> Iterator[Event]:
        """Gives the job a slot, and, the first time, its state from the run directory."""
        try:
            if job.longest > self.limits.capacity:
                raise DataError(f"a sample of {job.longest} tokens is above the capacity of {self.limits.capacity}.")
            if not job.has_started:
                yield from self._keeper.open(job)
            job.state, job.reason = JobState.RUNNING, None
            self._keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            job.state, job.reason = JobState.PAUSED, Reason.of(error)
            yield JobPaused(job.spec.name, job.step, job.reason)
            return
        except (DataError, CheckpointError) as error:
            yield from self._leave(job, JobState.FAILED, Reason.of(error))
            yield JobFailed(job.spec.name, job.step, Reason.of(error))
            return
        if not self._places.give(job):
            yield from self._do_without(job)
        elif job.has_started:
            yield JobResumed(job.spec.name, job.step)
        else:
            job.has_started = True
            self.timeline.offset_s = max(self.timeline.offset_s, self._keeper.elapsed_s(job))
            # A job restored at its end still has to write its adapter.
            job.settled_step = -1 if job.is_complete else job.step
            yield JobStarted(job.spec.name, job.step, job.num_steps)

    def _do_without(self, job: LiveJob) -> Iterator[Event]:
        """After the memory for a job turned out not to be there: it waits for others to end, or fails if alone."""
        release_memory(self.backbone)
        if any(other.slot is not None for other in self.jobs.values()):
            job.state, job.has_heard = JobState.QUEUED, True
            yield JobWaiting(job.spec.name, job.step, LESS_WAS_FREE)
            return
        yield from self._leave(job, JobState.FAILED, NO_ROOM)
        yield JobFailed(job.spec.name, job.step, NO_ROOM)

    def _command(self, action: Literal["cancel", "pause", "resume"], name: str) -> None:
        self._job(name)
        self._commands.append(_Command(action, name))

    def _job(self, name: str) -> LiveJob:
        if name not in self.jobs:
            raise ConfigError(f"there is no job {name!r}; there are {', '.join(self.jobs) or 'none'}.")
        return self.jobs[name]
