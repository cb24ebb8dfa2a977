"""What becomes of jobs at step boundaries: they start, wait, give way, pause and leave; microbatches get smaller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.engine.capacity import NO_ROOM, OUT_OF_MEMORY, CapacityLimit, too_long
from weft.engine.events import (
    Event,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobPreempted,
    JobResumed,
    JobStarted,
    JobWaiting,
    JobWarning,
)
from weft.engine.live_job import LiveJob
from weft.engine.placement import Placement
from weft.engine.program_run import rewind
from weft.engine.recorder import RunRecorder
from weft.engine.timeline import TimelineRecorder
from weft.errors import CheckpointError, DataError, StorageError
from weft.execute.protocol import Executor
from weft.job_state import JobState, Reason, ReasonCode

LESS_WAS_FREE = Reason(ReasonCode.NO_MEMORY_NOW, "waits for memory: less was free than its adapter takes")


@dataclass(frozen=True)
class Command:
    """Something a user asked for, to be done at the next step boundary."""

    action: Literal["start", "cancel", "pause", "resume"]
    job: str


class Lifecycle:
    """Carries out what admission, users and a full memory decide about jobs."""

    def __init__(
        self,
        executor: Executor,
        jobs: Mapping[str, LiveJob],
        *,
        room: CapacityLimit,
        places: Placement,
        keeper: RunRecorder,
        timeline: TimelineRecorder,
    ) -> None:
        """`jobs`: those of the engine, as they come and go."""
        self.executor = executor
        self.jobs = jobs
        self.room = room
        self.places = places
        self.keeper = keeper
        self.timeline = timeline

    def running(self) -> list[LiveJob]:
        """The jobs that train."""
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self.jobs.values()) if job.state is JobState.RUNNING]

    def obey(self, command: Command) -> Iterator[Event]:
        """Carries out what a user asked for."""
        job = self.jobs[command.job]
        if job.state.is_final:
            return
        if command.action == "cancel":
            yield from self.leave(job, JobState.CANCELLED, Reason(ReasonCode.CANCELLED, "cancelled"))
            yield JobCancelled(job.name, job.step)
        elif command.action == "pause" and job.state is not JobState.PAUSED:
            yield from self.pause(job, None)
        elif command.action == "resume" and job.state is JobState.PAUSED:
            job.status.wait(None, has_heard=False)

    def admit(self) -> list[Event]:
        """Does what admission decides: some jobs start or go on, some give way, the others hear why they wait."""
        if not self.places.waiting():
            return []
        events = self.fit_microbatches()
        with self.timeline.span("plan"):
            decision = self.places.decide(self.room.capacity)
        for held in decision.refuse:
            job = self.jobs[held.job]
            events += [*self.leave(job, JobState.FAILED, held.reason), JobFailed(held.job, job.step, held.reason)]
        for held in decision.preempt:
            events += self._preempt(self.jobs[held.job], held.reason)
        for name in decision.start:
            events += self._start(self.jobs[name])
        for held in decision.wait:
            job = self.jobs[held.job]
            if not job.status.has_heard:
                job.status.has_heard = True
                events.append(JobWaiting(held.job, job.step, held.reason))
        return events

    def fit_microbatches(self) -> list[Event]:
        """Before any have run: smaller ones, where those asked for would leave too little memory for jobs."""
        said = None if self.running() else self.room.fit(self.places)
        names = tuple(job.name for job in self.places.waiting())
        return [] if said is None else [JobWarning(names, said)]

    def leave(self, job: LiveJob, state: JobState, reason: Reason | None = None) -> list[Event]:
        """The job's slot becomes free for others; what cannot be written about that is only a warning."""
        self.places.take(job)
        job.status.become(state, reason)
        try:
            self.keeper.flush(job)
            self.keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            return [JobWarning((job.name,), f"its end could not be recorded: {error}")]
        return []

    def pause(self, job: LiveJob, reason: Reason | None, *, save: bool = True) -> Iterator[Event]:
        """Keeps a job at its last step boundary, saved unless told otherwise, with its place free for others."""
        job.status.become(JobState.PAUSED, reason)
        rewind(self.executor, job)
        try:
            # Before its first start, what is in memory is not the job's state; that may be on disk.
            if save and job.status.has_started:
                yield from self.keeper.save(job, self.timeline.now())
            self.keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            job.status.become(JobState.PAUSED, Reason.of(error))
        self.places.take(job)
        yield JobPaused(job.name, job.step, job.reason)

    def make_room(self, names: Sequence[str]) -> list[Event]:
        """After the memory ran out: smaller microbatches; the jobs concerned go on from their last step.

        Jobs with a sample that fills a whole microbatch are in the way of smaller ones, so they fail.
        """
        for name in names:
            rewind(self.executor, self.jobs[name])
        self.executor.release_memory()
        self.places.ran_out()
        events: list[Event] = []
        before = self.room.capacity
        if not self.room.shrink():
            for job in self.room.holders():
                reason = too_long(job.longest)
                events += [*self.leave(job, JobState.FAILED, reason), JobFailed(job.name, job.step, reason)]
            self.room.shrink()
        if self.running() and self.room.capacity < before:
            events.append(JobWarning(tuple(names), OUT_OF_MEMORY.format(before=before, now=self.room.capacity)))
        return events

    def _preempt(self, job: LiveJob, reason: Reason) -> Iterator[Event]:
        """Lets a job wait at its last step boundary, its state on the CPU."""
        job.status.wait(reason, has_heard=True)
        self.places.take(job)
        try:
            self.keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            yield JobWarning((job.name,), f"that it waits could not be recorded: {error}")
        yield JobPreempted(job.name, job.step, reason)

    def _start(self, job: LiveJob) -> Iterator[Event]:
        """Gives the job a slot, and, the first time, its state from the run directory."""
        try:
            if job.longest > self.room.capacity:
                raise DataError(f"a sample of {job.longest} tokens is above the capacity of {self.room.capacity}.")
            if not job.status.has_started:
                yield from self.keeper.open(job)
            job.status.become(JobState.RUNNING)
            self.keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            job.status.become(JobState.PAUSED, Reason.of(error))
            yield JobPaused(job.name, job.step, job.reason)
            return
        except (DataError, CheckpointError) as error:
            yield from self.leave(job, JobState.FAILED, Reason.of(error))
            yield JobFailed(job.name, job.step, Reason.of(error))
            return
        if not self.places.give(job):
            yield from self._do_without(job)
        elif job.status.has_started:
            yield JobResumed(job.name, job.step)
        else:
            job.status.has_started = True
            self.timeline.offset_s = max(self.timeline.offset_s, self.keeper.elapsed_s(job))
            # A job restored at its end still has to write its adapter.
            job.status.settled_step = -1 if job.progress.is_complete else job.step
            yield JobStarted(job.name, job.step, job.num_steps)

    def _do_without(self, job: LiveJob) -> Iterator[Event]:
        """After the memory for a job turned out not to be there: it waits for others to end, or fails if alone."""
        self.executor.release_memory()
        if any(other.status.has_place for other in self.jobs.values()):
            job.status.wait(None, has_heard=True)
            yield JobWaiting(job.name, job.step, LESS_WAS_FREE)
            return
        yield from self.leave(job, JobState.FAILED, NO_ROOM)
        yield JobFailed(job.name, job.step, NO_ROOM)
