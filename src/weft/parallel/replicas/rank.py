"""A rank: one replica of the backbone in a process of its own, with an engine that applies a controller's commands.

Between two events of its engine it reads commands. When the controller is gone it exits at once: what is on disk is
whole, and the next process continues from there.
"""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection

from weft.data.dataset import JobData
from weft.data.load import load_job_data
from weft.engine.engine import Engine
from weft.engine.events import EvalDone, Event, JobEnded, JobEvent, JobPaused, MicrobatchDone, StepDone
from weft.engine.execute.local import executor_on
from weft.engine.execute.memory import COMPILING, ExpectedJobs, load_within
from weft.engine.execute.protocol import Executor, Replica, ReplicaFaultError, ReplicaMemoryError
from weft.errors import StorageError, WeftError
from weft.job_state import JobState, Reason
from weft.model.model_part import weight_sample
from weft.model.resolve import ResolvedModel, resolve
from weft.parallel.replicas.connections import JOINS_AGAIN, ControllerLink, RankConnection
from weft.parallel.replicas.messages import (
    SEND_S,
    AdapterChecked,
    BeStage,
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
    answer_to,
)
from weft.parallel.stages import stage_process
from weft.parallel.stages.load_stages import StageLayout, load_stages, stage_cost, stage_planner
from weft.plan.cost.shape import choose_capacity
from weft.plan.cost.types import slot_seconds
from weft.plan.layout import Layout
from weft.plan.pack import planner_named
from weft.plan.planner import Planner
from weft.processes import visible_gpus
from weft.spec import AdapterSpec
from weft.store.run_dir import RankDirectory, library_versions


def run_rank(connection: RankConnection) -> None:
    """Serves a controller until it ends or ends the rank; ConfigError if it refuses this rank."""
    link = ControllerLink(connection)
    try:
        gpu = next(iter(visible_gpus()), "")
        link.send(RankJoined(socket.gethostname(), os.getpid(), library_versions(), gpu))
        first = connection.recv()
        if isinstance(first, BeStage):
            assert isinstance(connection, Connection), "stages join over the network"
            stage_process.main(connection, lost_code=JOINS_AGAIN)
        if isinstance(first, SetUp):
            link.keep_alive()
            rank = Rank(link, first.order, first.index)
            rank.serve()
            rank.close()
    except (EOFError, ConnectionError):
        # The controller is gone. Threads may be writing; files appear whole or not at all.
        os._exit(1)
    except Exception as error:
        link.send(RankFailed(_sendable(error)))
        raise
    if isinstance(first, RefuseRank):
        raise first.error


def _sendable(error: Exception) -> Exception:
    return error if isinstance(error, WeftError) else RuntimeError(f"{type(error).__name__}: {error}")


class Rank:
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
        self._unsent: list[RankEvent] = []
        self._sent_s = time.perf_counter()
        self._is_steered = order.is_controlled
        self._awaited_eval: tuple[str, int] | None = None
        """Job and step of an evaluation that the controller has not confirmed."""
        self._queries: list[JobQuery] = []
        self._is_over = False
        self._num_applied = 0
        budget = self.engine.budget(order.adapters)
        facts, capacity = self.engine.executor.facts, self.engine.limits.capacity
        speed = _speed(order, model, facts.layout, self.engine.row_tile, capacity)
        link.send(RankReady(facts, capacity, budget, weights, speed, notes))

    def serve(self) -> None:
        while not self._is_over:
            self._apply(self._link.connection.recv())
            while not self._is_over and self._link.connection.poll():
                self._apply(self._link.connection.recv())
            num_applied = -1
            while not self._is_over and num_applied != self._num_applied:
                # Again after a command that arrived while only files were still being written.
                num_applied = self._num_applied
                self._train_jobs()
            if self._is_over:
                break
            self.engine.finish_files()
            self._send_events()
            self._link.send(RankIdle(self._num_applied))

    def _train_jobs(self) -> None:
        for event in self.engine.events():
            self._report(event)
            while not self._is_over and (self._awaited_eval is not None or self._link.connection.poll()):
                self._apply(self._link.connection.recv())
            if self._is_over:
                return

    def close(self) -> None:
        self.engine.finish_files()
        self.engine.close()
        if self._directory is not None:
            self._directory.close()

    def _report(self, event: Event) -> None:
        """Sends an event, together with those that follow soon unless it is urgent."""
        if isinstance(event, JobPaused) and event.job in self._releasing:
            self._releasing.discard(event.job)
            if event.reason is None:
                self.engine.forget(event.job)
                self._queries = [query for query in self._queries if query.job != event.job]
                self._send_events()
                self._link.send(JobReleased(event.job, event.step))
                return
            # It could not be saved, or the run is stopping: it stays here, paused.
        if isinstance(event, JobEnded):
            self._releasing.discard(event.job)
        if isinstance(event, EvalDone) and self._is_steered:
            self._awaited_eval = event.job, event.step
        self._unsent.append(RankEvent(event, self._view(event)))
        is_old = time.perf_counter() - self._sent_s > SEND_S
        if is_old or not isinstance(event, StepDone | MicrobatchDone):
            self._send_events()
        self._answer_all()

    def _view(self, event: Event) -> JobView | None:
        job = self.engine.jobs.get(event.job) if isinstance(event, JobEvent) else None
        return None if job is None else JobView(job.step, job.num_tokens, job.may_end, job.has_best)

    def _answer_all(self) -> None:
        """Answers queries that can be answered, after all earlier events."""
        for query in list(self._queries):
            job = self.engine.jobs.get(query.job)
            has_come = job is not None and job.status.has_started and job.step >= query.step and not query.is_ended
            if job is None or not (has_come or job.state.is_final):
                continue
            self._queries.remove(query)
            answer, failure = None, None
            try:
                answer = answer_to(query.question, self.engine, query.job)
            except (WeftError, ReplicaMemoryError) as error:
                failure = error
            self._send_events()
            self._link.send(QueryResult(query.job, job.step, job.num_tokens, answer, failure))

    def _send_events(self) -> None:
        if self._unsent:
            self._link.send(EventBatch(tuple(self._unsent)))
        self._unsent, self._sent_s = [], time.perf_counter()

    def _apply(self, command: Command) -> None:
        engine = self.engine
        self._num_applied += 1
        match command:
            case OpenDirectory():
                self._link.send(DirectoryOpened(self._open(command)))
            case CheckJob(order):
                self._link.send(self._checked(order))
            case TrainJob(order, hold_step):
                self._train(order, hold_step)
            case ReleaseJob(job):
                # One that has ended meanwhile has reported it.
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
                self._queries.append(command)
                self._answer_all()
            case CheckAdapter(adapter):
                self._link.send(AdapterChecked(self._flaw(adapter)))
            case ContinueJob(job, step):
                if self._awaited_eval == (job, step):
                    self._awaited_eval = None
            case StopJobs():
                engine.stop()
            case EndRank():
                self._is_over = True
            case _:
                raise AssertionError(f"no rank knows {command}")

    def _open(self, command: OpenDirectory) -> StorageError | None:
        """Keeps jobs in the run directory; returns the error, if any."""
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
            return JobChecked(name, error=_sendable(error))
        return JobChecked(name, job.num_parameters, job.inputs, self.engine.bytes_of(job), job.notes)

    def _train(self, order: JobOrder, hold_step: int | None) -> None:
        name = order.spec.name
        if name in self.engine.jobs:
            # It ended here before: its files have its progress.
            self.engine.forget(name)
        try:
            self.engine.submit(order.spec, self._data(order), base_dir=order.base_dir)
        except ReplicaFaultError:
            raise
        except Exception as error:
            # Such as data that changed after the check: other jobs continue.
            reason = Reason.of(error) if isinstance(error, WeftError) else Reason.of_bug(error)
            self._link.send(JobRefused(name, reason))
            return
        if hold_step is not None:
            self.engine.hold(name, hold_step)

    def _data(self, order: JobOrder) -> JobData:
        tokenizer = self.engine.executor.tokenizer
        return load_job_data(order.spec, tokenizer, order.base_dir, clock=order.clock)


def _open_replica(
    order: RankOrder, model: ResolvedModel, layout: StageLayout | None
) -> tuple[Executor, str | None, tuple[str, ...]]:
    """Opens the replicas of a rank. Returns them with a digest of the weights, if this rank has all of them, and notes
    for the user."""
    expected = ExpectedJobs(order.adapters, order.max_jobs or len(order.adapters), order.have_any_order)
    if layout is None:
        backbone, notes = load_within(model, order.memory_limit, expected)
        return executor_on(backbone), weight_sample(backbone.model), notes
    staged = load_stages(model, layout, order.memory_limit, expected)
    return staged, None, (COMPILING,) if staged.is_compiling else ()


def _planner(order: RankOrder, model: ResolvedModel, layout: StageLayout | None, replica: Replica) -> Planner:
    if layout is None:
        return planner_named(order.planner)
    capacity = choose_capacity(order.capacity, replica.facts.device_kind, order.longest)
    return stage_planner(model, order.planner, layout, replica.row_tile(capacity))


def _speed(order: RankOrder, model: ResolvedModel, layout: Layout, row_tile: int, capacity: int) -> float:
    """Predicted tokens per second of a rank; 1 if all ranks have the same layout."""
    if len({str(own) for own in order.layouts}) < 2:
        return 1.0
    found = 0.0
    for replica in layout.replicas:
        cost = stage_cost(model, replica.stages, row_tile, replica.tensor)
        found += replica.shards * capacity / slot_seconds(cost, replica.stages, [capacity])
    return found
