"""A rank: one replica of the backbone in a process of its own, with an engine that does what a controller asks.

Between two events of its engine it looks for commands. When the controller is gone it ends at once: what is on disk is
whole, and whoever comes next goes on from there.
"""

from __future__ import annotations

import os
import socket
import time

from weft.data.dataset import JobData
from weft.data.load import load_job_data
from weft.engine.engine import Engine
from weft.engine.events import EvalDone, Event, JobEnded, JobEvent, JobPaused, MicrobatchDone, StepDone
from weft.engine.execute.local import executor_on
from weft.engine.execute.memory import COMPILING, ExpectedJobs, load_within
from weft.engine.execute.protocol import Executor, ReplicaFaultError, ReplicaMemoryError
from weft.errors import StorageError, WeftError
from weft.job_state import JobState, Reason
from weft.model.resolve import ResolvedModel, resolve
from weft.model.weight_sample import weight_sample
from weft.parallel.load_staged import stage_planner
from weft.parallel.replicas.controller_link import ControllerLink, RankConnection
from weft.parallel.replicas.messages import (
    SEND_S,
    AdapterChecked,
    CancelJob,
    CheckAdapter,
    CheckJob,
    Command,
    ContinueJob,
    DirectoryOpened,
    EndRank,
    EventBatch,
    ForgetJob,
    HoldJob,
    JobChecked,
    JobOrder,
    JobQuery,
    JobRefused,
    JobReleased,
    JobView,
    OpenDirectory,
    QueryResult,
    RankEvent,
    RankFailed,
    RankIdle,
    RankJoined,
    RankOrder,
    RankReady,
    RefuseRank,
    ReleaseJob,
    SetUp,
    StopJobs,
    TrainJob,
)
from weft.parallel.replicas.questions import answer_to
from weft.parallel.stages.load_stages import StageLayout, load_stages, stage_cost
from weft.plan.cost.rows import choose_capacity
from weft.plan.cost.types import slot_seconds
from weft.plan.layout import Layout
from weft.plan.pack import planner_named
from weft.plan.program import Planner
from weft.spec import AdapterSpec
from weft.store.rank_dir import RankDirectory
from weft.store.run_record import library_versions


def run_rank(connection: RankConnection) -> None:
    """Serves a controller until that ends, or has no more to do; ConfigError if it wants other ranks than this one."""
    link = ControllerLink(connection)
    try:
        link.tell(RankJoined(socket.gethostname(), os.getpid(), library_versions()))
        told = connection.recv()
        if isinstance(told, SetUp):
            link.keep_alive()
            rank = Rank(link, told.order, told.index)
            rank.serve()
            rank.close()
    except (EOFError, ConnectionError):
        # The controller is gone. Threads may be writing; what they write appears whole or not at all.
        os._exit(1)
    except Exception as error:
        link.tell(RankFailed(_tellable(error)))
        raise
    if isinstance(told, RefuseRank):
        raise told.error


def _tellable(error: Exception) -> Exception:
    """An error as it can cross a connection, whoever raised it."""
    return error if isinstance(error, WeftError) else RuntimeError(f"{type(error).__name__}: {error}")


class Rank:
    """An engine and the controller it serves."""

    def __init__(self, link: ControllerLink, order: RankOrder, index: int) -> None:
        self._link = link
        self._index = index
        self._directory: RankDirectory | None = None
        layout = order.layouts[index] if order.layouts else None
        model = resolve(order.backbone)
        executor, weights, notes = _open_replica(order, model, layout)
        self.engine = Engine(
            executor,
            capacity=order.capacity,
            longest=order.longest,
            planner=_planner(order, model, layout, executor),
            max_jobs=order.max_jobs,
            tenant_weights=order.tenant_weights,
        )
        self._releasing: set[str] = set()
        """Jobs that are let go of as soon as they are paused."""
        self._untold: list[RankEvent] = []
        self._told_s = time.perf_counter()
        self._is_steered = order.is_controlled
        self._unheard: tuple[str, int] | None = None
        """The job and the step of an evaluation that nobody has heard of yet."""
        self._asked: list[JobQuery] = []
        """What jobs cannot be asked yet."""
        self._is_over = False
        self._num_applied = 0
        budget = self.engine.budget(order.adapters)
        facts, capacity = self.engine.executor.facts, self.engine.limits.capacity
        speed = _speed(order, model, facts.layout, self.engine.row_tile, capacity)
        link.tell(RankReady(facts, capacity, budget, weights, speed, notes))

    def serve(self) -> None:
        """Trains and obeys until told that it is over."""
        while not self._is_over:
            self._obey(self._link.connection.recv())
            while not self._is_over and self._link.connection.poll():
                self._obey(self._link.connection.recv())
            num_applied = -1
            while not self._is_over and num_applied != self._num_applied:
                # Again after a command that came when no job could go on any more and only files were being written.
                num_applied = self._num_applied
                self._train_jobs()
            if self._is_over:
                break
            self.engine.finish_files()
            self._tell()
            self._link.tell(RankIdle(self._num_applied))

    def _train_jobs(self) -> None:
        """Trains until no job can go on, and obeys between two events."""
        for event in self.engine.events():
            self._hear(event)
            while not self._is_over and (self._unheard is not None or self._link.connection.poll()):
                self._obey(self._link.connection.recv())
            if self._is_over:
                return

    def close(self) -> None:
        """Lets go of the run directory, with all files written, and of the replica."""
        self.engine.finish_files()
        self.engine.close()
        if self._directory is not None:
            self._directory.close()

    def _hear(self, event: Event) -> None:
        """Tells what happened, together with what follows soon unless it matters at once."""
        if isinstance(event, JobPaused) and event.job in self._releasing:
            self._releasing.discard(event.job)
            if event.reason is None:
                self.engine.forget(event.job)
                self._asked = [asked for asked in self._asked if asked.job != event.job]
                self._tell()
                self._link.tell(JobReleased(event.job, event.step))
                return
            # It could not be saved, or the whole run stops: it stays here, paused.
        if isinstance(event, JobEnded):
            self._releasing.discard(event.job)
        if isinstance(event, EvalDone) and self._is_steered:
            self._unheard = event.job, event.step
        self._untold.append(RankEvent(event, self._view(event)))
        is_old = time.perf_counter() - self._told_s > SEND_S
        if is_old or not isinstance(event, StepDone | MicrobatchDone):
            self._tell()
        self._answer_all()

    def _view(self, event: Event) -> JobView | None:
        job = self.engine.jobs.get(event.job) if isinstance(event, JobEvent) else None
        return None if job is None else JobView(job.step, job.num_tokens, job.may_end, job.has_best)

    def _answer_all(self) -> None:
        """Answers what can be answered by now, after everything that has been told."""
        for asked in list(self._asked):
            job = self.engine.jobs.get(asked.job)
            has_come = job is not None and job.status.has_started and job.step >= asked.step and not asked.is_ended
            if job is None or not (has_come or job.state.is_final):
                continue
            self._asked.remove(asked)
            answer, failure = None, None
            try:
                answer = answer_to(asked.question, self.engine, asked.job)
            except (WeftError, ReplicaMemoryError) as error:
                failure = error
            self._tell()
            self._link.tell(QueryResult(asked.job, job.step, job.num_tokens, answer, failure))

    def _tell(self) -> None:
        if self._untold:
            self._link.tell(EventBatch(tuple(self._untold)))
        self._untold, self._told_s = [], time.perf_counter()

    def _obey(self, command: Command) -> None:
        engine = self.engine
        self._num_applied += 1
        match command:
            case OpenDirectory():
                self._link.tell(DirectoryOpened(self._open(command)))
            case CheckJob(order):
                self._link.tell(self._checked(order))
            case TrainJob(order, hold_step):
                self._train(order, hold_step)
            case ReleaseJob(job):
                # One that has ended in the meantime has said so.
                if job in engine.jobs and engine.jobs[job].is_alive and engine.jobs[job].state is not JobState.PAUSED:
                    self._releasing.add(job)
                    engine.pause(job)
            case CancelJob(job):
                if job in engine.jobs:
                    engine.cancel(job)
            case HoldJob(job, step):
                if job in engine.jobs:
                    engine.hold(job, step)
            case ForgetJob(job):
                if job in engine.jobs:
                    engine.forget(job)
            case JobQuery():
                self._asked.append(command)
                self._answer_all()
            case CheckAdapter(adapter):
                self._link.tell(AdapterChecked(self._flaw(adapter)))
            case ContinueJob(job, step):
                if self._unheard == (job, step):
                    self._unheard = None
            case StopJobs():
                engine.stop()
            case EndRank():
                self._is_over = True
            case _:
                raise AssertionError(f"no rank knows {command}")

    def _open(self, command: OpenDirectory) -> StorageError | None:
        """Keeps jobs in the run directory; returns what is in the way of that."""
        try:
            self._directory = RankDirectory(command.path, self._index, command.owner, command.permit)
        except StorageError as error:
            return error
        self.engine.keep_in(self._directory)
        return None

    def _flaw(self, adapter: AdapterSpec) -> WeftError | None:
        try:
            self.engine.executor.check_adapter(adapter)
        except WeftError as error:
            return error
        return None

    def _checked(self, order: JobOrder) -> JobChecked:
        name = order.spec.name
        try:
            job = self.engine.check(order.spec, self._data(order), base_dir=order.base_dir)
        except ReplicaFaultError:
            raise
        except Exception as error:
            return JobChecked(name, error=_tellable(error))
        return JobChecked(name, job.num_parameters, self.engine.bytes_of(job), job.notes)

    def _train(self, order: JobOrder, hold_step: int | None) -> None:
        name = order.spec.name
        if name in self.engine.jobs:
            # It ended here before, or was given up: the files know how far it came.
            self.engine.forget(name)
        try:
            self.engine.submit(order.spec, self._data(order), base_dir=order.base_dir)
        except ReplicaFaultError:
            raise
        except Exception as error:
            # Such as data that has changed since the job was checked: that is no reason to end the others.
            reason = Reason.of(error) if isinstance(error, WeftError) else Reason.of_bug(error)
            self._link.tell(JobRefused(name, reason))
            return
        if hold_step is not None:
            self.engine.hold(name, hold_step)

    def _data(self, order: JobOrder) -> JobData:
        tokenizer = self.engine.executor.tokenizer
        return load_job_data(order.spec, tokenizer, order.base_dir, clock=order.clock)


def _open_replica(
    order: RankOrder, model: ResolvedModel, layout: StageLayout | None
) -> tuple[Executor, str | None, tuple[str, ...]]:
    """A rank's replica, or replicas; a digest of its weights if it has all of them, and what is worth telling."""
    expected = ExpectedJobs(order.adapters, order.max_jobs or len(order.adapters), order.have_any_order)
    if layout is None:
        backbone, notes = load_within(model, order.memory_limit, expected)
        return executor_on(backbone), weight_sample(backbone.model), notes
    staged = load_stages(model, layout, order.memory_limit, expected)
    return staged, None, (COMPILING,) if staged.is_compiling else ()


def _planner(order: RankOrder, model: ResolvedModel, layout: StageLayout | None, executor: Executor) -> Planner:
    if layout is None:
        return planner_named(order.planner)
    capacity = choose_capacity(order.capacity, executor.facts.device_kind, order.longest)
    return stage_planner(model, order.planner, layout, executor.row_tile(capacity))


def _speed(order: RankOrder, model: ResolvedModel, layout: Layout, row_tile: int, capacity: int) -> float:
    """Tokens that a rank is predicted to train in a second; 1 where all are alike."""
    if len({str(own) for own in order.layouts}) < 2:
        return 1.0
    found = 0.0
    for replica in layout.replicas:
        cost = stage_cost(model, replica.stages, row_tile, replica.tensor)
        found += replica.shards * capacity / slot_seconds(cost, replica.stages, [capacity])
    return found
