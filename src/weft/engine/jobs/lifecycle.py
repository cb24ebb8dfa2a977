"""The one place where jobs change their state, and the decisions about them at step boundaries.

Each change is made, recorded on disk, and reported as an event (`JobTransitions`). Admission, users and a full memory
cause the changes (`Lifecycle`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weft.engine.events import (
    CheckpointSaved,
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
)
from weft.engine.execute.protocol import Executor, ReplicaFaultError, Seats
from weft.engine.jobs.live_job import FinishedSteps, LiveJob
from weft.engine.jobs.room import NO_ROOM, OUT_OF_MEMORY, CapacityLimit, Placement, too_long
from weft.engine.program_run import rewind
from weft.engine.recorder import FileKind, RunRecorder
from weft.engine.timeline import TimelineRecorder
from weft.errors import CheckpointError, DataError, StorageError
from weft.job_state import JobState, Reason, ReasonCode
from weft.store.wall_clock import Activity


class JobTransitions:
    """Changes the state of jobs; nothing else assigns to `LiveJob.status`."""

    def __init__(self, seats: Seats, placement: Placement, keeper: RunRecorder, timeline: TimelineRecorder) -> None:
        self._seats = seats
        self._placement = placement
        self._keeper = keeper
        self._timeline = timeline
        self.sync_progress: Callable[[], None] = lambda: None
        """Finishes the begun steps of stages, so that progress matches the weights."""

    def queue(self, job: LiveJob) -> None:
        self._set(job, JobState.QUEUED, None)
        job.status = replace(job.status, wait_reported=False)

    def report_waiting(self, job: LiveJob, reason: Reason) -> list[Event]:
        """Reports once why a queued job waits."""
        if job.status.wait_reported:
            return []
        job.status = replace(job.status, wait_reported=True)
        return [JobWaiting(job.name, job.step, reason)]

    def wait(self, job: LiveJob, reason: Reason) -> list[Event]:
        self.queue(job)
        return self.report_waiting(job, reason)

    def preempt(self, job: LiveJob, reason: Reason) -> list[Event]:
        """Makes a job wait at its last step boundary, with its state on the CPU."""
        self._sync([job])
        self._set(job, JobState.QUEUED, reason)
        job.status = replace(job.status, wait_reported=True)
        self._placement.take(job)
        remarks: list[Event] = []
        try:
            self._keeper.write_status(job, self._timeline.now())
        except StorageError as error:
            remarks.append(JobWarning((job.name,), f"that it waits could not be recorded: {error}"))
        return [*remarks, JobPreempted(job.name, job.step, reason)]

    def run(self, job: LiveJob) -> None:
        self._set(job, JobState.RUNNING, None)
        self._keeper.write_status(job, self._timeline.now())

    def report_running(self, job: LiveJob) -> list[Event]:
        if job.status.has_started:
            return [JobResumed(job.name, job.step)]
        job.status = replace(job.status, has_started=True)
        job.finished = FinishedSteps(job.step, evaluated=job.step, saved=job.step, saved_s=self._timeline.own_s())
        if job.progress.owes_eval:
            job.finished.evaluated = -1
        if job.progress.is_complete or job.progress.owes_eval:
            # A job restored at its end still has to write its adapter.
            job.finished.last = -1
        return [JobStarted(job.name, job.step, job.num_steps)]

    def close(self, job: LiveJob) -> None:
        """Frees the seat of a job that has done all its steps; it ends once its files are written."""
        self._placement.take(job)
        job.status = replace(job.status, is_closing=True)

    def pause(self, jobs: Sequence[LiveJob], reason: Reason | None, *, save: bool = True) -> list[Event]:
        self._sync(jobs)
        for job in jobs:
            self._set(job, JobState.PAUSED, reason)
            rewind(self._seats, job)
            # Before its first start the job's state is on disk, not in memory.
            if save and job.status.has_started:
                self._keeper.start_checkpoint(job, self._timeline.now())
                job.finished.saved_s = self._timeline.own_s()
        return [event for job in jobs for event in self._wait_paused(job)]

    def _wait_paused(self, job: LiveJob) -> list[Event]:
        saved, error = self._saved(job)
        try:
            if error is not None:
                raise error
            self._keeper.write_status(job, self._timeline.now())
        except StorageError as failure:
            self._set(job, JobState.PAUSED, Reason.of(failure))
        self._placement.take(job)
        return [*saved, JobPaused(job.name, job.step, job.reason)]

    def _saved(self, job: LiveJob) -> tuple[list[Event], Exception | None]:
        """Waits for a job's files: checkpoints that were saved, and the error of the last one."""
        files = [file for file in self._keeper.files.finish(job) if file.kind is FileKind.CHECKPOINT]
        saved: list[Event] = [CheckpointSaved(job.name, file.step) for file in files if file.error is None]
        return saved, files[-1].error if files else None

    def pause_unrecorded(self, job: LiveJob, error: StorageError) -> list[Event]:
        """Pauses a job without a seat, because its files cannot be written now."""
        self._set(job, JobState.PAUSED, Reason.of(error))
        return [JobPaused(job.name, job.step, job.reason)]

    def save_paused(self, job: LiveJob) -> list[Event]:
        """Saves a job that a full disk has paused, if there is room by now; else warns its owner. A checkpoint follows
        the metrics and the evaluation of its step, so there is none without them."""
        saved: list[Event] = []
        try:
            self._keeper.flush(job)
            if not job.is_eval_due():
                self._keeper.start_checkpoint(job, self._timeline.now())
                saved, error = self._saved(job)
                if error is not None:
                    raise error
            self._keeper.write_status(job, self._timeline.now())
        except StorageError as error:
            return [JobWarning((job.name,), f"its steps since the last checkpoint are in memory only: {error}")]
        return saved

    def fail(self, job: LiveJob, reason: Reason, *, can_retry: bool = False) -> list[Event]:
        """Fails a job; with `can_retry` a resumed run starts it again."""
        return [*self._end(job, JobState.FAILED, reason, can_retry), JobFailed(job.name, job.step, reason)]

    def cancel(self, job: LiveJob) -> list[Event]:
        remarks = self._end(job, JobState.CANCELLED, Reason(ReasonCode.CANCELLED, "cancelled"))
        return [*remarks, JobCancelled(job.name, job.step)]

    def succeed(self, job: LiveJob, adapter_dir: str | None) -> list[Event]:
        remarks = self._end(job, JobState.SUCCEEDED, None)
        return [*remarks, JobSucceeded(job.name, job.step, adapter_dir, job.progress.stopped_early)]

    def _end(self, job: LiveJob, state: JobState, reason: Reason | None, can_retry: bool = False) -> list[Event]:
        """Ends a job and frees its slot; a failed write is only a warning."""
        self._sync([job])
        # After the event a caller may remove the job's files.
        self._keeper.files.finish(job)
        self._placement.take(job)
        self._set(job, state, reason)
        try:
            self._keeper.flush(job)
            self._keeper.write_status(job, self._timeline.now(), can_retry=can_retry)
        except StorageError as error:
            return [JobWarning((job.name,), f"its end could not be recorded: {error}")]
        return []

    def _sync(self, jobs: Sequence[LiveJob]) -> None:
        if any(job.begun_step is not None for job in jobs):
            self.sync_progress()

    def _set(self, job: LiveJob, state: JobState, reason: Reason | None) -> None:
        assert not job.state.is_final, "nothing follows a final state"
        job.status = replace(job.status, state=state, reason=reason, is_closing=False)


LOG = logging.getLogger("weft.engine")
LESS_MEMORY_THAN_PLANNED = Reason(ReasonCode.NO_MEMORY_NOW, "waits for memory: less was free than its adapter takes")


@dataclass(frozen=True)
class Command:
    """A user's request, applied at the next step boundary."""

    action: Literal["start", "cancel", "pause", "resume"]
    job: str


class Lifecycle:
    """Applies what admission, users and a full memory decide about jobs."""

    def __init__(
        self,
        executor: Executor,
        jobs: Mapping[str, LiveJob],
        *,
        room: CapacityLimit,
        placement: Placement,
        keeper: RunRecorder,
        timeline: TimelineRecorder,
    ) -> None:
        self.executor = executor
        self.jobs = jobs
        self.room = room
        self.placement = placement
        self.keeper = keeper
        self.timeline = timeline
        self.transitions = JobTransitions(executor, placement, keeper, timeline)

    def running(self) -> list[LiveJob]:
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self.jobs.values()) if job.is_running]

    def with_due_work(self) -> list[LiveJob]:
        jobs = list(self.jobs.values())
        return [job for job in jobs if job.state is JobState.RUNNING and not job.is_step_finished]

    def running_next(self) -> list[LiveJob]:
        """Jobs that train next: all that are neither held nor evaluated, or one suspect alone."""
        running = [job for job in self.running() if not (job.progress.is_held or job.is_evaluating)]
        suspects = [job for job in running if job.is_suspect]
        return suspects[:1] or running

    def apply(self, command: Command) -> list[Event]:
        """Applies a command completely, so that a caller who stops reading leaves no half of it."""
        job = self.jobs[command.job]
        try:
            return list(self._apply(command, job))
        except ReplicaFaultError:
            raise
        except Exception as error:
            return self.blame(job, error)

    def _apply(self, command: Command, job: LiveJob) -> Iterator[Event]:
        if not job.is_alive:
            return
        if command.action == "cancel":
            yield from self.transitions.cancel(job)
        elif command.action == "pause" and job.state is not JobState.PAUSED:
            yield from self.transitions.pause([job], None)
        elif command.action == "resume" and job.state is JobState.PAUSED:
            self.transitions.queue(job)

    def admit(self) -> list[Event]:
        """Applies an admission decision: starts, preempts, refuses, and reports why the others wait."""
        if not self.placement.waiting():
            return []
        events = self.fit_microbatches()
        with self.timeline.span("plan"):
            decision = self.placement.decide(self.room.capacity)
        for held in decision.refuse:
            events += self.transitions.fail(self.jobs[held.job], held.reason)
        for held in decision.preempt:
            events += self.transitions.preempt(self.jobs[held.job], held.reason)
        for name in decision.start:
            events += self._start_alone(self.jobs[name])
        for held in decision.wait:
            events += self.transitions.report_waiting(self.jobs[held.job], held.reason)
        return events

    def fit_microbatches(self) -> list[Event]:
        message = None if self.running() else self.room.fit(self.placement)
        names = tuple(job.name for job in self.placement.waiting())
        return [] if message is None else [JobWarning(names, message)]

    def blame(self, job: LiveJob, error: Exception) -> list[Event]:
        LOG.error("%s failed", job.name, exc_info=error)
        return self.transitions.fail(job, Reason.of_bug(error))

    def isolate_failure(self, names: Sequence[str], error: Exception) -> list[Event]:
        """After a microbatch raised: a job that was alone in it fails; of several, each runs its next step alone.
        Nothing of the microbatch is counted, so all jobs continue from their last step boundary, exact to the bit."""
        for job in self.running():
            rewind(self.executor, job)
        if len(names) == 1:
            return self.blame(self.jobs[names[0]], error)
        LOG.warning("a microbatch of %s failed; each runs alone next", ", ".join(names), exc_info=error)
        for name in names:
            self.jobs[name].is_suspect = True
        return []

    def free_memory(self, names: Sequence[str]) -> list[Event]:
        """After the memory ran out: makes microbatches smaller and rewinds the jobs concerned. Jobs with a sample that
        fills a whole microbatch fail, because microbatches could not become smaller."""
        for name in names:
            rewind(self.executor, self.jobs[name])
        self.executor.release_memory()
        self.placement.ran_out()
        events: list[Event] = []
        before = self.room.capacity
        if not self.room.shrink():
            for job in self.room.holders():
                events += self.transitions.fail(job, too_long(job.longest))
            self.room.shrink()
        if self.running() and self.room.capacity < before:
            events.append(JobWarning(tuple(names), OUT_OF_MEMORY.format(before=before, now=self.room.capacity)))
        return events

    def _start_alone(self, job: LiveJob) -> list[Event]:
        try:
            return list(self._start(job))
        except ReplicaFaultError:
            raise
        except Exception as error:
            return self.blame(job, error)

    def _start(self, job: LiveJob) -> Iterator[Event]:
        """Gives a job a slot and, the first time, its state from the run directory."""
        try:
            if job.longest > self.room.capacity:
                raise DataError(f"a sample of {job.longest} tokens is above the capacity of {self.room.capacity}.")
            if not job.status.has_started:
                with self.timeline.wall.spending(Activity.LOADING):
                    yield from self.keeper.open(job)
            self.transitions.run(job)
        except StorageError as error:
            yield from self.transitions.pause_unrecorded(job, error)
            return
        except (DataError, CheckpointError) as error:
            # It has taken no step in this process, and the cause may be put right.
            yield from self.transitions.fail(job, Reason.of(error), can_retry=True)
            return
        with self.timeline.wall.spending(Activity.LOADING):
            has_seat = self.placement.give(job)
        if not has_seat:
            yield from self._do_without(job)
            return
        if not job.status.has_started:
            self.timeline.offset_s = max(self.timeline.offset_s, self.keeper.elapsed_s(job))
        yield from self.transitions.report_running(job)

    def _do_without(self, job: LiveJob) -> list[Event]:
        """Handles missing memory for a job: it waits for others to end, or fails if alone."""
        self.executor.release_memory()
        if self.placement.is_empty():
            return self.transitions.fail(job, NO_ROOM)
        return self.transitions.wait(job, LESS_MEMORY_THAN_PLANNED)
