"""An engine over many ranks: it places jobs on replicas of the backbone, and tells what happens on all of them.

Every rank trains the jobs it has exactly as one engine would, so who trains where changes no bit. A job moves by being
saved at a step boundary in one place and gone on with from that checkpoint in another. A rank that dies takes nothing
with it but the steps since the last checkpoints: its jobs go on elsewhere, and another process takes its place.
"""

from __future__ import annotations

import datetime
import queue
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weft.data.chat.chat_template import Tokenizer
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
from weft.engine.timeline import TimelineRecorder
from weft.errors import ConfigError, JobError, StorageError
from weft.execute.protocol import ReplicaFacts
from weft.job_state import JobState
from weft.plan.types import Limits
from weft.replicas.known_job import KnownJob
from weft.replicas.known_rank import KnownRank, decide
from weft.replicas.messages import (
    CheckJob,
    Command,
    DirectoryOpened,
    EventsTold,
    JobChecked,
    JobOrder,
    JobRefused,
    JobReleased,
    OpenDirectory,
    RankFailed,
    RankIdle,
    RankOrder,
    RankReady,
    ReleaseJob,
    Report,
    StopJobs,
    ToldEvent,
    TrainJob,
)
from weft.replicas.rank_pool import RankEnded, RankHandle, RankPool, RankProcess, Ranks, no_ranks_left
from weft.spec import JobSpec
from weft.store.rank_dir import merge_timelines
from weft.store.run_dir import RunDirectory
from weft.wall_clock import TimeSplit, WallClock

SILENT_S = 30.0
"""A rank that gives no sign of life for so long is ended and replaced."""
JOIN_S = 300.0
"""The same before it has joined: it imports libraries, perhaps over a network."""
MAX_RESTARTS = 3
"""So often a rank is started anew without having saved anything in between."""
AnswerT = TypeVar("AnswerT", bound=Report)
LOOK_S = 0.5
"""Seconds between two looks at who is silent."""


@dataclass(frozen=True)
class ReplicaInfo:
    """What all replicas have in common."""

    facts: ReplicaFacts
    tokenizer: Tokenizer


class ReplicatedEngine:
    """Trains any number of jobs on several replicas of one backbone."""

    def __init__(
        self,
        order: RankOrder,
        tokenizer: Tokenizer,
        variables: Sequence[Mapping[str, str]],
        *,
        clock: datetime.datetime | None = None,
        wall: WallClock | None = None,
        open_pool: Callable[[RankOrder, Sequence[Mapping[str, str]]], Ranks] = RankPool,
        silent_s: float = SILENT_S,
    ) -> None:
        """Starts a rank for each of `variables`, which its environment gets, and waits until all are loaded.

        `clock`: what time it is for the chat templates of its jobs. `open_pool` makes what starts and hears the ranks.
        One that gives no sign of life for `silent_s` is ended and replaced.
        """
        self.timeline = TimelineRecorder(wall)
        self.jobs: dict[str, KnownJob] = {}
        self.notes: tuple[str, ...] = ()
        self.clock = clock
        self._weights = order.tenant_weights
        self._pool = open_pool(order, variables)
        self._silent_s = silent_s
        self._looked_s = time.monotonic()
        self._close = weakref.finalize(self, self._pool.close)
        self._directory: RunDirectory | None = None
        self._earlier = TimeSplit({})
        """What sessions before this one spent."""
        self._untold: deque[ToldEvent] = deque()
        self._is_stale = True
        """Something has changed that decides who trains where."""
        self._is_stopping = False
        self._num_jobs = 0
        self._last_end = ""
        """How the last rank that ended did so."""
        try:
            self._ranks: dict[int, KnownRank] = {}
            for index in range(len(variables)):
                self._ranks[index] = KnownRank(self._pool.start(index))
            self._await_ranks()
        except BaseException:
            # Nothing is to be saved, and one that loads would not hear that it is over.
            for rank in self._ranks.values():
                self._pool.kill(rank.process)
            self.close()
            raise
        ready = self._ranks[0].ready
        assert ready is not None
        self.executor = ReplicaInfo(ready.facts, tokenizer)
        self.limits = Limits(ready.capacity)
        """What a microbatch may hold."""

    @property
    def num_replicas(self) -> int:
        """Ranks there are."""
        return len(self._ranks)

    @property
    def process_ids(self) -> dict[int, int]:
        """The process of each rank, by the rank's number."""
        known = {index: rank.process for index, rank in self._ranks.items()}
        return {index: rank.process.pid for index, rank in known.items() if isinstance(rank, RankProcess)}

    def close(self) -> None:
        """Ends all ranks; what their jobs have not saved is lost."""
        self._close()

    def submit(self, spec: JobSpec, data: JobData, *, base_dir: Path | str = ".") -> None:
        """Adds a job; bad data or an adapter that does not fit raises here and changes nothing for the others."""
        if spec.name in self.jobs:
            raise ConfigError(f"there is already a job {spec.name!r}.", where="name")
        order = JobOrder(spec, Path(base_dir).absolute(), self.clock)
        checked = self._check(order)
        if checked.error is not None:
            raise checked.error
        job = KnownJob.of(order, data, self._num_jobs)
        job.num_parameters, job.notes = checked.num_parameters, checked.notes
        self._num_jobs += 1
        self.jobs[spec.name] = job
        self._is_stale = True

    def keep_in(self, directory: RunDirectory) -> None:
        """Jobs are written there, and go on from what is there; ranks write the files of their own jobs.

        StorageError if a rank does not see the directory, such as one on a machine that does not share it.
        """
        self._directory = directory
        self._earlier = directory.read_time() or TimeSplit({})
        for rank in [rank for rank in self._ranks.values() if rank.ready is not None]:
            self._send(rank, OpenDirectory(directory.path.absolute(), directory.owner))
            opened = self._await_report(rank, DirectoryOpened)
            if opened is not None and opened.error is not None:
                raise opened.error

    def stop(self) -> None:
        """Saves every job at its last step boundary; `events` then ends. No finished step is lost."""
        if not self._is_stopping:
            self._is_stopping = True
            for rank in self._ranks.values():
                self._send(rank, StopJobs())

    def finish_files(self) -> None:
        """Nothing is left to wait for: a rank that is idle has written its files."""

    def events(self) -> Iterator[Event]:
        """Trains, and yields what happens on all ranks; ends when no job can go on."""
        while True:
            while self._untold:
                yield from self._tell(self._untold.popleft())
            if not self._is_stopping and self._pool.inbox.empty():
                # Jobs that end together on many ranks lead to one placement, not to one each.
                self._place()
            if self._untold:
                continue
            if self._is_over():
                break
            self._hear_next()
        self._is_stopping = False
        try:
            self._write_times()
        except StorageError as error:
            yield JobWarning((), f"timeline: {error}")

    @property
    def time_split(self) -> TimeSplit:
        """Where the wall clock of the run went so far, over all its sessions."""
        return self._earlier + self.timeline.wall.split()

    def _tell(self, told: ToldEvent) -> Iterator[Event]:
        """Tells something, unless it is of a job that its owner has forgotten."""
        event = told.event
        job = self.jobs.get(event.job) if isinstance(event, JobEvent) else None
        if job is not None and told.view is not None:
            job.show(told.view)
        if job is not None or not isinstance(event, JobEvent):
            yield event

    def _say(self, event: Event) -> None:
        """Something that no rank tells."""
        self._untold.append(ToldEvent(event))

    def _is_over(self) -> bool:
        """Whether nothing is under way, and nothing can be."""
        if not all(rank.is_idle for rank in self._ranks.values() if rank.ready is not None):
            return False
        if self._is_stopping:
            return True
        states = {job.state for job in self.jobs.values()}
        if JobState.QUEUED not in states:
            return True
        if not self._ranks:
            raise no_ranks_left(self._last_end)
        # Those that are held keep their places, and others may have to wait for these.
        is_placed = not self._is_stale and all(rank.ready is not None for rank in self._ranks.values())
        return is_placed and JobState.RUNNING in states

    def _place(self) -> None:
        """Carries out what placement decides, once nobody is on the way from one rank to another."""
        if not self._is_stale or any(job.is_leaving for job in self.jobs.values()):
            return
        if not any(rank.ready is not None for rank in self._ranks.values()):
            return
        self._is_stale = False
        decided = decide(list(self.jobs.values()), list(self._ranks.values()), self._weights)
        for move in decided.moves:
            self._release(self.jobs[move.job])
        for held in decided.admission.preempt:
            job = self.jobs[held.job]
            self._release(job)
            self._say(JobPreempted(job.name, job.step, held.reason))
        for name in decided.admission.start:
            job = self.jobs[name]
            job.rank = int(decided.replica_of[name])
            self._send(self._ranks[job.rank], TrainJob(job.order, job.hold_step))
        for held in decided.admission.wait:
            job = self.jobs[held.job]
            if not job.has_heard and not job.has_started:
                job.has_heard = True
                self._say(JobWaiting(job.name, job.step, held.reason))
        for held in decided.admission.refuse:
            job = self.jobs[held.job]
            self._end(job, JobFailed(job.name, job.step, held.reason))

    def _release(self, job: KnownJob) -> None:
        if job.is_leaving:
            return
        assert job.rank is not None
        job.is_leaving = True
        self._send(self._ranks[job.rank], ReleaseJob(job.name))

    def _end(self, job: KnownJob, event: JobEnded, *, can_retry: bool = False) -> None:
        """Ends a job that no rank has."""
        job.hear(event)
        more = {"step": job.step, "num_steps": job.num_steps, **({"can_retry": True} if can_retry else {})}
        try:
            if self._directory is not None:
                self._directory.write_status(job.name, job.state, reason=job.reason, **more)
        except StorageError as error:
            self._say(JobWarning((job.name,), f"its end could not be recorded: {error}"))
        self._say(event)

    def _send(self, rank: KnownRank, command: Command) -> None:
        """Tells a rank something; one that is still being loaded is told all it has to know once it is ready."""
        if rank.ready is not None:
            rank.is_idle = False
            rank.process.send(command)

    def _next_report(self) -> tuple[RankHandle, Report] | None:
        """What a rank tells next, if it comes soon; whoever waits for something looks after the silent meanwhile."""
        self._end_silent()
        try:
            return self._pool.inbox.get(timeout=LOOK_S)
        except queue.Empty:
            return None

    def _check(self, order: JobOrder) -> JobChecked:
        """Asks the rank with the fewest jobs whether a job fits; another one, if that is gone before it answers."""
        while True:
            rank = self._least_loaded()
            if rank is None:
                self._hear_next()
                continue
            self._send(rank, CheckJob(order))
            checked = self._await_report(rank, JobChecked)
            if checked is not None:
                return checked

    def _least_loaded(self) -> KnownRank | None:
        """The rank with the fewest jobs; None while none is loaded."""
        if not self._ranks:
            raise no_ranks_left(self._last_end)
        loads = Counter(job.rank for job in self.jobs.values() if not job.state.is_final)
        ready = [rank for rank in self._ranks.values() if rank.ready is not None]
        return min(ready, key=lambda rank: (loads[rank.index], rank.index), default=None)

    def _await_report(self, rank: KnownRank, kind: type[AnswerT]) -> AnswerT | None:
        """What a rank was asked for; None if it is gone before it has told that."""
        while self._ranks.get(rank.index) is rank:
            told = self._hear_next()
            if told is not None and told[0] is rank.process and isinstance(told[1], kind):
                return told[1]
        return None

    def _hear_next(self) -> tuple[RankHandle, Report] | None:
        """Takes note of what a rank tells next, if it comes soon, and returns it."""
        told = self._next_report()
        if told is not None:
            self._hear(*told)
        return told

    def _await_ranks(self) -> None:
        """Until all replicas are loaded; what keeps one from it is raised."""
        while any(rank.ready is None for rank in self._ranks.values()):
            told = self._next_report()
            if told is None:
                continue
            process, report = told
            if isinstance(report, RankFailed):
                raise report.error
            if isinstance(report, RankEnded):
                how = self._ranks[process.index].failure or report.how
                raise JobError(f"{how}.", where=f"replica {process.index}")
            self._hear(process, report)

    def _hear(self, process: RankHandle, report: Report) -> None:
        """Takes note of what a rank tells; one that has been replaced is not heard any more."""
        rank = self._ranks.get(process.index)
        if rank is None or rank.process is not process:
            return
        match report:
            case RankReady():
                rank.ready, self._is_stale = report, True
                self.notes = tuple(dict.fromkeys([*self.notes, *report.notes]))
                if self._directory is not None:
                    self._send(rank, OpenDirectory(self._directory.path.absolute(), self._directory.owner))
            case DirectoryOpened(error) if error is not None:
                rank.failure = str(error).rstrip(".")
                self._pool.kill(rank.process)
            case RankIdle(num_obeyed):
                rank.is_idle = num_obeyed == process.num_sent
            case JobReleased(name, step):
                self._lose(self.jobs[name], step)
            case JobRefused(name, reason):
                job = self.jobs[name]
                self._end(job, JobFailed(name, job.step, reason), can_retry=True)
                self._is_stale = True
            case EventsTold(events):
                for told in events:
                    self._hear_event(rank, told)
            case RankFailed(error):
                rank.failure = f"failed: {str(error).rstrip('.')}"
            case RankEnded(how):
                self._replace(rank, rank.failure or how)

    def _lose(self, job: KnownJob, step: int) -> None:
        """A job is on no rank any more, and goes on from a step; one that was cancelled meanwhile ends here."""
        job.lose_rank(step)
        self._is_stale = True
        if job.is_cancelled and not job.state.is_final:
            self._end(job, JobCancelled(job.name, job.step))

    def _hear_event(self, rank: KnownRank, told: ToldEvent) -> None:
        event, now_s = told.event, time.perf_counter()
        if isinstance(event, MicrobatchDone):
            rank.learn(event)
            # Whose tokens they are stays with the rank.
            jobs = dict.fromkeys(event.jobs, event.tokens / len(event.jobs))
            self.timeline.add("forward_backward", event.seconds, now_s, jobs=jobs)
        elif isinstance(event, EvalDone):
            self.timeline.add("eval", event.eval_runtime, now_s, jobs={event.job: 0})
        job = self.jobs.get(event.job) if isinstance(event, JobEvent) else None
        if job is not None and isinstance(event, JobWaiting | JobPreempted):
            # There is less room than was predicted: somebody else may have some.
            others = [other for other in self.jobs.values() if other.rank == rank.index and not other.state.is_final]
            rank.max_jobs = max(1, len(others) - 1)
            self._release(job)
            return
        if isinstance(event, CheckpointSaved):
            rank.num_restarts = 0
        if job is not None and isinstance(event, JobEvent):
            job.hear(event, told.view)
            # One that has ended, or waits for room on the disk, leaves its place to another.
            self._is_stale |= job.state is not JobState.RUNNING
        self._untold.append(told)

    def _replace(self, rank: KnownRank, how: str) -> None:
        """Starts another process for a rank that is gone; its jobs go on from their last checkpoints meanwhile."""
        index = rank.index
        lost = [job for job in self.jobs.values() if job.rank == index]
        for job in lost:
            self._lose(job, job.saved_step)
        self._is_stale, self._last_end = True, how
        names = tuple(job.name for job in lost if job.state is JobState.QUEUED)
        follows = "its jobs go on from their last checkpoints" if names else "no job was on it"
        self._say(JobWarning(names, f"replica {index} {how}; {follows}"))
        if rank.num_restarts < MAX_RESTARTS and not self._is_stopping:
            self._ranks[index] = KnownRank(self._pool.start(index), num_restarts=rank.num_restarts + 1)
        else:
            del self._ranks[index]

    def _end_silent(self) -> None:
        """Ends ranks that have given no sign of life for long: stopped, hung, or on a machine that is."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        # After a long time without a look, it was this process that stood still, and nobody could be heard.
        has_slept, self._looked_s = now_s - self._looked_s > self._silent_s / 2, now_s
        for rank in self._ranks.values():
            limit_s = self._silent_s if rank.process.connection is not None else JOIN_S
            if has_slept:
                rank.process.heard_s = now_s
            elif now_s - rank.process.heard_s > limit_s:
                rank.failure = f"gave no sign of life for {limit_s:g} s and was ended"
                self._pool.kill(rank.process)

    def _write_times(self) -> None:
        if self._directory is not None:
            merge_timelines(self._directory.path, self._directory.timeline_path)
            self._directory.write_time(self.time_split)
