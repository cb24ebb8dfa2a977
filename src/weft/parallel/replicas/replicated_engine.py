"""An engine over many ranks: it assigns jobs to replicas of the backbone, and reports what happens on all of them.

Every rank trains its jobs exactly as one engine would, so the assignment changes no bit. A job moves by a checkpoint at
a step boundary. When a rank dies, only the steps since the last checkpoints are lost: its jobs continue on other ranks,
and a new process replaces it.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from weft.data.chat_template import Tokenizer
from weft.data.dataset import JobData
from weft.engine.events import (
    CheckpointSaved,
    EvalDone,
    Event,
    JobCancelled,
    JobEnded,
    JobEvent,
    JobFailed,
    JobPreempted,
    JobWaiting,
    JobWarning,
    MicrobatchDone,
)
from weft.engine.execute.protocol import ReplicaFacts
from weft.engine.timeline import TimelineRecorder
from weft.errors import ConfigError, StorageError
from weft.job_state import JobState
from weft.model.source import load_tokenizer
from weft.parallel.replicas.connections import RankEnded
from weft.parallel.replicas.hosts import RankProcess
from weft.parallel.replicas.messages import (
    CheckJob,
    Command,
    DirectoryOpened,
    EventBatch,
    JobChecked,
    JobOrder,
    JobRefused,
    JobReleased,
    OpenDirectory,
    RankEvent,
    RankReady,
    ReleaseJob,
    Report,
    StopJobs,
    TrainJob,
)
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.records import JobRecord, RankRecord, decide
from weft.plan.simulate.timeline import span_event, trace_json
from weft.plan.types import Limits
from weft.spec import JobSpec, RunSpec
from weft.store.atomic import write_file
from weft.store.run_dir import RunDirectory, grant_permit, revoke_permit, take_timelines
from weft.store.wall_clock import Activity, TimeSplit, WallClock

AnswerT = TypeVar("AnswerT", bound=Report)
RunT = TypeVar("RunT", bound=RunSpec)


@dataclass(frozen=True)
class ReplicaInfo:
    facts: ReplicaFacts
    tokenizer: Tokenizer


class ReplicatedEngine:
    """Trains any number of jobs on several replicas of one backbone."""

    def __init__(
        self,
        ranks: RankGroup,
        tokenizer: Tokenizer,
        *,
        clock: datetime.datetime | None = None,
        wall: WallClock | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        homes: Mapping[str, int] | None = None,
    ) -> None:
        """Waits until all ranks are loaded. `clock`: time for the chat templates of its jobs; `homes`: the ranks that
        jobs are planned on."""
        self.timeline = TimelineRecorder(wall)
        self.jobs: dict[str, JobRecord] = {}
        self.clock = clock
        self._weights = tenant_weights or {}
        self._homes = homes or {}
        self._directory: RunDirectory | None = None
        self._events: deque[RankEvent] = deque()
        self._is_stale = True
        self._is_stopping = False
        self._num_jobs = 0
        self._tokenizer = tokenizer
        self._past_spans: list[Any] = []
        self._use(ranks)

    @classmethod
    def load(
        cls,
        spec: RunT,
        ranks: RankGroup,
        *,
        clock: datetime.datetime,
        wall: WallClock | None = None,
        notes: tuple[str, ...] = (),
        **options: Any,
    ) -> tuple[RunT, Self, tuple[str, ...]]:
        """An engine over ranks that are being loaded, with a run's settings and without jobs, and notes for the user.
        In the returned run a capacity of `auto` is a number, so that all that follows agrees on it."""
        wall = wall or WallClock()
        try:
            tokenizer = load_tokenizer(spec.base_model)
            engine = cls(ranks, tokenizer, clock=clock, wall=wall, tenant_weights=spec.tenant_weights, **options)
        except BaseException:
            ranks.abandon()
            raise
        wall.add_start(Activity.LOADING)
        return dataclasses.replace(spec, capacity=engine.limits.capacity), engine, (*notes, *engine.notes)

    def _use(self, ranks: RankGroup) -> None:
        ranks.await_all()
        self._ranks = ranks
        self._close = weakref.finalize(self, ranks.close)
        self.limits = Limits(ranks.first.capacity)

    @property
    def executor(self) -> ReplicaInfo:
        return ReplicaInfo(self._ranks.first.facts, self._tokenizer)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._ranks.notes

    @property
    def num_replicas(self) -> int:
        return len(self._ranks)

    @property
    def layout(self) -> str:
        return str(self._ranks.layout)

    @property
    def process_ids(self) -> dict[int, int]:
        known = {rank.index: rank.process for rank in self._ranks}
        return {index: rank.process.pid for index, rank in known.items() if isinstance(rank, RankProcess)}

    def close(self) -> None:
        """Ends all ranks; unsaved steps of their jobs are lost."""
        self._close()
        for rank in self._ranks:
            revoke_permit(rank.permit)

    def submit(self, spec: JobSpec, data: JobData, *, base_dir: Path | str = ".") -> None:
        if spec.name in self.jobs:
            raise ConfigError(f"there is already a job {spec.name!r}.", where="name")
        order = JobOrder(spec, Path(base_dir).absolute(), self.clock)
        checked = self._call_any(CheckJob(order), JobChecked)
        if checked.error is not None:
            raise checked.error
        job = JobRecord.of(order, data, self._num_jobs)
        job.num_parameters, job.num_bytes, job.notes = checked.num_parameters, checked.num_bytes, checked.notes
        job.inputs = checked.inputs
        self._num_jobs += 1
        self.jobs[spec.name] = job
        self._is_stale = True

    def keep_in(self, directory: RunDirectory) -> None:
        """Writes jobs to a run directory, and continues from what it holds; ranks write the files of their own jobs.
        StorageError if a rank does not see the directory, such as one on a machine that does not share it."""
        self._directory = directory
        self.timeline.wall.go_on_from(directory.read_time())
        self._open_directories()

    def _open_directories(self) -> None:
        for rank in self._ranks.loaded:
            self._open_directory(rank)
            opened = self._await_report(rank, DirectoryOpened)
            if opened is not None and opened.error is not None:
                raise opened.error

    def stop(self) -> None:
        """Saves every job at its last step boundary; `events` then ends."""
        if not self._is_stopping:
            self._is_stopping = True
            for rank in self._ranks:
                self._ranks.send(rank, StopJobs())

    def finish_files(self) -> None:
        """Does nothing: an idle rank has written its files."""

    def events(self) -> Iterator[Event]:
        """Trains, and yields what happens on all ranks; ends when no job can continue."""
        while True:
            while self._events:
                yield from self._release_event(self._events.popleft())
            if not self._is_stopping and self._ranks.is_drained:
                # Jobs that end together on many ranks cause one placement, not one each.
                self._assign_jobs()
            if self._events:
                continue
            if self._is_over():
                break
            self._receive_next()
        self._is_stopping = False
        try:
            self._write_times()
        except StorageError as error:
            yield JobWarning((), f"timeline: {error}")

    @property
    def time_split(self) -> TimeSplit:
        return self.timeline.wall.of_run()

    def _release_event(self, rank_event: RankEvent) -> Iterator[Event]:
        event = rank_event.event
        job = self.jobs.get(event.job) if isinstance(event, JobEvent) else None
        if job is not None and rank_event.view is not None:
            job.show(rank_event.view)
        if job is not None or not isinstance(event, JobEvent):
            yield event

    def _queue_event(self, event: Event) -> None:
        self._events.append(RankEvent(event))

    def _is_over(self) -> bool:
        """True if no work is under way and no job can continue."""
        if any(rank.ready is not None and not rank.is_idle for rank in self._ranks):
            return False
        if self._is_stopping:
            return True
        states = {job.state for job in self.jobs.values()}
        if JobState.QUEUED not in states:
            return True
        if not self._ranks:
            raise self._ranks.none_left()
        # Held jobs keep their seats, and others may have to wait for them.
        has_assigned = not self._is_stale and len(self._ranks.loaded) == len(self._ranks)
        return has_assigned and JobState.RUNNING in states

    def _assign_jobs(self) -> None:
        """Applies a placement, once no job is moving between ranks."""
        if not self._is_stale or any(job.is_leaving for job in self.jobs.values()):
            return
        if not self._ranks.loaded:
            return
        self._is_stale = False
        decided = decide(list(self.jobs.values()), list(self._ranks), self._weights, self._homes)
        for move in decided.moves:
            self._release(self.jobs[move.job])
        for held in decided.admission.preempt:
            job = self.jobs[held.job]
            self._release(job)
            self._queue_event(JobPreempted(job.name, job.step, held.reason))
        for name in decided.admission.start:
            job = self.jobs[name]
            job.rank = int(decided.replica_of[name])
            self._ranks.send(self._ranks[job.rank], TrainJob(job.order, job.hold_step))
        for held in decided.admission.wait:
            job = self.jobs[held.job]
            if not job.wait_reported and not job.has_started:
                job.wait_reported = True
                self._queue_event(JobWaiting(job.name, job.step, held.reason))
        for held in decided.admission.refuse:
            job = self.jobs[held.job]
            self._end(job, JobFailed(job.name, job.step, held.reason))

    def _open_directory(self, rank: RankRecord) -> None:
        assert self._directory is not None
        path = self._directory.path.absolute()
        rank.permit = grant_permit(path)
        self._ranks.send(rank, OpenDirectory(path, self._directory.owner, rank.permit))

    def _release(self, job: JobRecord) -> None:
        if job.is_leaving:
            return
        assert job.rank is not None
        job.is_leaving = True
        self._ranks.send(self._ranks[job.rank], ReleaseJob(job.name))

    def _end(self, job: JobRecord, event: JobEnded, *, can_retry: bool = False) -> None:
        job.update(event)
        more = {"step": job.step, "num_steps": job.num_steps, **({"can_retry": True} if can_retry else {})}
        try:
            if self._directory is not None:
                self._directory.write_status(job.name, job.state, reason=job.reason, **more)
        except StorageError as error:
            self._queue_event(JobWarning((job.name,), f"its end could not be recorded: {error}"))
        self._queue_event(event)

    def _call_any(self, question: Command, kind: type[AnswerT]) -> AnswerT:
        """Sends a command to the rank with the fewest jobs and returns its answer; if that rank ends before, another
        one's."""
        while True:
            rank = self._least_loaded()
            if rank is None:
                self._receive_next()
                continue
            self._ranks.send(rank, question)
            answer = self._await_report(rank, kind)
            if answer is not None:
                return answer

    def _least_loaded(self) -> RankRecord | None:
        return self._ranks.least_loaded([job.rank for job in self.jobs.values() if not job.state.is_final])

    def _await_report(self, rank: RankRecord, kind: type[AnswerT]) -> AnswerT | None:
        """The rank's next report of this kind; None if the rank ends before."""
        while rank in self._ranks:
            rank_event = self._receive_next()
            if rank_event is not None and rank_event[0] is rank and isinstance(rank_event[1], kind):
                return rank_event[1]
        return None

    def _receive_next(self) -> tuple[RankRecord, Report] | None:
        rank_event = self._ranks.next_report()
        if rank_event is not None:
            self._handle_report(*rank_event)
        return rank_event

    def _handle_report(self, rank: RankRecord, report: Report) -> None:
        match report:
            case RankReady():
                self._is_stale = True
                if self._directory is not None:
                    self._open_directory(rank)
            case DirectoryOpened(error) if error is not None:
                self._ranks.give_up(rank, str(error).rstrip("."))
            case JobReleased(name, step):
                self._lose(self.jobs[name], step)
            case JobRefused(name, reason):
                job = self.jobs[name]
                self._end(job, JobFailed(name, job.step, reason), can_retry=True)
                self._is_stale = True
            case EventBatch(events):
                for rank_event in events:
                    self._handle_event(rank, rank_event)
            case RankEnded(how):
                self._replace(rank, rank.failure or how)

    def _lose(self, job: JobRecord, step: int) -> None:
        """Takes a job off its rank at a step; one that was cancelled meanwhile ends here."""
        job.rank_lost(step)
        self._is_stale = True
        if job.is_cancelled and not job.state.is_final:
            self._end(job, JobCancelled(job.name, job.step))

    def _handle_event(self, rank: RankRecord, rank_event: RankEvent) -> None:
        event, now_s = rank_event.event, time.perf_counter()
        if isinstance(event, MicrobatchDone):
            rank.learn(event)
            # Only the rank knows the tokens of each job.
            jobs = dict.fromkeys(event.jobs, event.tokens / len(event.jobs))
            self.timeline.add("forward_backward", event.seconds, now_s, jobs=jobs)
        elif isinstance(event, EvalDone):
            self.timeline.add("eval", event.eval_runtime, now_s, jobs={event.job: 0})
        job = self.jobs.get(event.job) if isinstance(event, JobEvent) else None
        if job is not None and isinstance(event, JobWaiting | JobPreempted):
            # There is less room than predicted; another rank may have some.
            others = [other for other in self.jobs.values() if other.rank == rank.index and not other.state.is_final]
            rank.max_jobs = max(1, len(others) - 1)
            self._release(job)
            return
        if isinstance(event, CheckpointSaved):
            rank.num_restarts = 0
        if job is not None and isinstance(event, JobEvent):
            job.update(event, rank_event.view)
            # A job that has ended, or waits for disk space, frees its seat.
            self._is_stale |= job.state is not JobState.RUNNING
        self._events.append(rank_event)

    def _replace(self, rank: RankRecord, how: str) -> None:
        """Starts another process for a rank that is gone; its jobs continue from their last checkpoints meanwhile."""
        index = rank.index
        # It may still run on an unreachable machine: then it must not write any more.
        revoke_permit(rank.permit)
        lost = [job for job in self.jobs.values() if job.rank == index]
        for job in lost:
            if self._directory is not None:
                self._directory.heal_job(job.name)
            self._lose(job, job.saved_step)
        self._is_stale = True
        names = tuple(job.name for job in lost if job.state is JobState.QUEUED)
        follows = "its jobs go on from their last checkpoints" if names else "no job was on it"
        self._queue_event(JobWarning(names, f"replica {index} {how}; {follows}"))
        self._ranks.replace(rank, how, is_wanted=not self._is_stopping)

    def _write_times(self) -> None:
        if self._directory is not None:
            self._keep_timelines()
            moves = [span_event(span, 0) for span in self.timeline.spans if span.name == "move"]
            write_file(self._directory.timeline_path, trace_json([*self._past_spans, *moves]))
            self._directory.write_time(self.time_split)

    def _keep_timelines(self) -> None:
        if self._directory is not None:
            self._past_spans += take_timelines(self._directory.path, self._ranks.first_bands)
