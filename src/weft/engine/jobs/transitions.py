"""The one place where jobs change their state: each change is made, recorded on disk, and told as an event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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
from weft.engine.execute.protocol import Executor
from weft.engine.job_files import FileKind
from weft.engine.jobs.live_job import FinishedSteps, LiveJob
from weft.engine.jobs.placement import Placement
from weft.engine.program_run import rewind
from weft.engine.recorder import RunRecorder
from weft.engine.timeline import TimelineRecorder
from weft.errors import StorageError
from weft.job_state import JobState, Reason, ReasonCode


class JobTransitions:
    """Changes the state of jobs; nothing else assigns to `LiveJob.status`."""

    def __init__(self, executor: Executor, places: Placement, keeper: RunRecorder, timeline: TimelineRecorder) -> None:
        self._executor = executor
        self._places = places
        self._keeper = keeper
        self._timeline = timeline
        self.land: Callable[[], None] = lambda: None
        """Brings stages that have begun further steps to their end, so that jobs stand where their weights do."""

    def queue(self, job: LiveJob) -> None:
        """A paused job asks for a place again."""
        self._set(job, JobState.QUEUED, None)
        job.status = replace(job.status, wait_reported=False)

    def report_waiting(self, job: LiveJob, reason: Reason) -> list[Event]:
        """The owner of a queued job hears, once, why the job waits."""
        if job.status.wait_reported:
            return []
        job.status = replace(job.status, wait_reported=True)
        return [JobWaiting(job.name, job.step, reason)]

    def wait(self, job: LiveJob, reason: Reason) -> list[Event]:
        """A job that was about to train is queued after all."""
        self.queue(job)
        return self.report_waiting(job, reason)

    def preempt(self, job: LiveJob, reason: Reason) -> list[Event]:
        """A job waits at its last step boundary, with its state on the CPU."""
        self._stand([job])
        self._set(job, JobState.QUEUED, reason)
        job.status = replace(job.status, wait_reported=True)
        self._places.take(job)
        remarks: list[Event] = []
        try:
            self._keeper.write_status(job, self._timeline.now())
        except StorageError as error:
            remarks.append(JobWarning((job.name,), f"that it waits could not be recorded: {error}"))
        return [*remarks, JobPreempted(job.name, job.step, reason)]

    def run(self, job: LiveJob) -> None:
        """A job is to train; StorageError if that cannot be recorded."""
        self._set(job, JobState.RUNNING, None)
        self._keeper.write_status(job, self._timeline.now())

    def report_running(self, job: LiveJob) -> list[Event]:
        """A job that is to train has its place: for the first time, or again."""
        if job.status.has_started:
            return [JobResumed(job.name, job.step)]
        job.status = replace(job.status, has_started=True)
        job.settled = FinishedSteps(job.step, evaluated=job.step, saved=job.step, saved_s=self._timeline.own_s())
        if job.progress.is_complete:
            # A job restored at its end still has to write its adapter.
            job.settled.last = -1
        return [JobStarted(job.name, job.step, job.num_steps)]

    def close(self, job: LiveJob) -> None:
        """A job that has done all its steps gives its place up; it ends once its files are written."""
        self._places.take(job)
        job.status = replace(job.status, is_closing=True)

    def pause(self, jobs: Sequence[LiveJob], reason: Reason | None, *, save: bool = True) -> list[Event]:
        """Jobs stay at their last step boundary, saved unless told otherwise, with their places free for others."""
        self._stand(jobs)
        for job in jobs:
            self._set(job, JobState.PAUSED, reason)
            rewind(self._executor, job)
            # Before its first start, what is in memory is not the job's state; that may be on disk.
            if save and job.status.has_started:
                self._keeper.start_checkpoint(job, self._timeline.now())
                job.settled.saved_s = self._timeline.own_s()
        return [event for job in jobs for event in self._wait_paused(job)]

    def _wait_paused(self, job: LiveJob) -> list[Event]:
        """Waits until a paused job is saved, and records that it is paused."""
        saved, error = self._saved(job)
        try:
            if error is not None:
                raise error
            self._keeper.write_status(job, self._timeline.now())
        except StorageError as failure:
            self._set(job, JobState.PAUSED, Reason.of(failure))
        self._places.take(job)
        return [*saved, JobPaused(job.name, job.step, job.reason)]

    def _saved(self, job: LiveJob) -> tuple[list[Event], Exception | None]:
        """Waits for a job's files; what was saved, and why the last checkpoint was not."""
        files = [file for file in self._keeper.files.finish(job) if file.kind is FileKind.CHECKPOINT]
        saved: list[Event] = [CheckpointSaved(job.name, file.step) for file in files if file.error is None]
        return saved, files[-1].error if files else None

    def pause_unrecorded(self, job: LiveJob, error: StorageError) -> list[Event]:
        """A job without a place waits to be resumed, because nothing can be written about it now."""
        self._set(job, JobState.PAUSED, Reason.of(error))
        return [JobPaused(job.name, job.step, job.reason)]

    def save_paused(self, job: LiveJob) -> list[Event]:
        """A job that a full disk has paused is saved after all, if there is room by now; else its owner is warned.

        A checkpoint stands behind the metrics and the evaluation of its step, so without these there is none.
        """
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

    def fail(self, job: LiveJob, reason: Reason) -> list[Event]:
        """A job ends because it cannot go on."""
        return [*self._end(job, JobState.FAILED, reason), JobFailed(job.name, job.step, reason)]

    def cancel(self, job: LiveJob) -> list[Event]:
        """A job ends because its owner wants it to."""
        remarks = self._end(job, JobState.CANCELLED, Reason(ReasonCode.CANCELLED, "cancelled"))
        return [*remarks, JobCancelled(job.name, job.step)]

    def succeed(self, job: LiveJob, adapter_dir: str | None) -> list[Event]:
        """A job ends because it is done."""
        remarks = self._end(job, JobState.SUCCEEDED, None)
        return [*remarks, JobSucceeded(job.name, job.step, adapter_dir, job.progress.stopped_early)]

    def _end(self, job: LiveJob, state: JobState, reason: Reason | None) -> list[Event]:
        """The job's slot becomes free for others; what cannot be written about that is only a warning."""
        self._stand([job])
        # Whoever hears of the end may remove the job's files.
        self._keeper.files.finish(job)
        self._places.take(job)
        self._set(job, state, reason)
        try:
            self._keeper.flush(job)
            self._keeper.write_status(job, self._timeline.now())
        except StorageError as error:
            return [JobWarning((job.name,), f"its end could not be recorded: {error}")]
        return []

    def _stand(self, jobs: Sequence[LiveJob]) -> None:
        """Nothing of these jobs is under way any more."""
        if any(job.begun_step is not None for job in jobs):
            self.land()

    def _set(self, job: LiveJob, state: JobState, reason: Reason | None) -> None:
        assert not job.state.is_final, "nothing follows a final state"
        job.status = replace(job.status, state=state, reason=reason, is_closing=False)
