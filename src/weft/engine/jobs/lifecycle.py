"""What is decided about jobs at step boundaries by admission, by users and by a full memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.engine.capacity import NO_ROOM, OUT_OF_MEMORY, CapacityLimit, too_long
from weft.engine.events import Event, JobWarning
from weft.engine.execute.protocol import Executor, ReplicaFaultError
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.placement import Placement
from weft.engine.jobs.transitions import JobTransitions
from weft.engine.program_run import rewind
from weft.engine.recorder import RunRecorder
from weft.engine.timeline import TimelineRecorder
from weft.errors import CheckpointError, DataError, StorageError
from weft.job_state import JobState, Reason, ReasonCode
from weft.wall_clock import Activity

LOG = logging.getLogger("weft.engine")
LESS_MEMORY_THAN_PLANNED = Reason(ReasonCode.NO_MEMORY_NOW, "waits for memory: less was free than its adapter takes")


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
        self.transitions = JobTransitions(executor, places, keeper, timeline)

    def running(self) -> list[LiveJob]:
        """The jobs that train."""
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self.jobs.values()) if job.is_running]

    def unsettled(self) -> list[LiveJob]:
        """The jobs for which something is left to do after their last step."""
        jobs = list(self.jobs.values())
        return [job for job in jobs if job.state is JobState.RUNNING and not job.is_settled]

    def running_next(self) -> list[LiveJob]:
        """The jobs that train next: all that are not held, or one alone while it is to be found out which cannot."""
        running = [job for job in self.running() if not job.progress.is_held]
        suspects = [job for job in running if job.is_suspect]
        return suspects[:1] or running

    def obey(self, command: Command) -> list[Event]:
        """Carries out what a user asked for; whole, so that a reader who leaves does not leave half of it behind."""
        job = self.jobs[command.job]
        try:
            return list(self._obey(command, job))
        except ReplicaFaultError:
            raise
        except Exception as error:
            return self.blame(job, error)

    def _obey(self, command: Command, job: LiveJob) -> Iterator[Event]:
        if not job.is_alive:
            return
        if command.action == "cancel":
            yield from self.transitions.cancel(job)
        elif command.action == "pause" and job.state is not JobState.PAUSED:
            yield from self.transitions.pause([job], None)
        elif command.action == "resume" and job.state is JobState.PAUSED:
            self.transitions.queue(job)

    def admit(self) -> list[Event]:
        """Does what admission decides: some jobs start or go on, some give way, the others hear why they wait."""
        if not self.places.waiting():
            return []
        events = self.fit_microbatches()
        with self.timeline.span("plan"):
            decision = self.places.decide(self.room.capacity)
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
        """Before any have run: smaller ones, where those asked for would leave too little memory for jobs."""
        said = None if self.running() else self.room.fit(self.places)
        names = tuple(job.name for job in self.places.waiting())
        return [] if said is None else [JobWarning(names, said)]

    def blame(self, job: LiveJob, error: Exception) -> list[Event]:
        """Ends a job because of an error that nobody raised on purpose; its neighbours go on."""
        LOG.error("%s failed", job.name, exc_info=error)
        return self.transitions.fail(job, Reason.of_bug(error))

    def isolate_failure(self, names: Sequence[str], error: Exception) -> list[Event]:
        """After a microbatch raised: a job that was alone in it fails; of several, each runs its next step alone.

        Nothing of the microbatch has been counted, so all jobs go on from their last step boundary, exact to the bit.
        """
        for job in self.running():
            rewind(self.executor, job)
        if len(names) == 1:
            return self.blame(self.jobs[names[0]], error)
        LOG.warning("a microbatch of %s failed; each runs alone next", ", ".join(names), exc_info=error)
        for name in names:
            self.jobs[name].is_suspect = True
        return []

    def free_memory(self, names: Sequence[str]) -> list[Event]:
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
                events += self.transitions.fail(job, too_long(job.longest))
            self.room.shrink()
        if self.running() and self.room.capacity < before:
            events.append(JobWarning(tuple(names), OUT_OF_MEMORY.format(before=before, now=self.room.capacity)))
        return events

    def _start_alone(self, job: LiveJob) -> list[Event]:
        """Starts a job; what that raises ends this job and no other."""
        try:
            return list(self._start(job))
        except ReplicaFaultError:
            raise
        except Exception as error:
            return self.blame(job, error)

    def _start(self, job: LiveJob) -> Iterator[Event]:
        """Gives the job a slot, and, the first time, its state from the run directory."""
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
            yield from self.transitions.fail(job, Reason.of(error))
            return
        with self.timeline.wall.spending(Activity.LOADING):
            has_place = self.places.give(job)
        if not has_place:
            yield from self._do_without(job)
            return
        if not job.status.has_started:
            self.timeline.offset_s = max(self.timeline.offset_s, self.keeper.elapsed_s(job))
        yield from self.transitions.report_running(job)

    def _do_without(self, job: LiveJob) -> list[Event]:
        """After the memory for a job turned out not to be there: it waits for others to end, or fails if alone."""
        self.executor.release_memory()
        if self.places.is_empty():
            return self.transitions.fail(job, NO_ROOM)
        return self.transitions.wait(job, LESS_MEMORY_THAN_PLANNED)
