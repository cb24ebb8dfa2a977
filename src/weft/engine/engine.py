"""Executes programs on a replica of the backbone, for jobs that come and go.

`submit`, `cancel`, `pause` and `resume` may be called at any time, from any thread and between events; they take effect
at the next step boundary. The backbone is never reloaded, and other jobs are not affected. Jobs without room wait, or
give way to a higher priority and continue later; no result depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.data.dataset import JobData
from weft.engine.events import Event, EventQueue, JobWarning, StepDone
from weft.engine.execute.local import executor_on
from weft.engine.execute.protocol import (
    AdapterWork,
    AnswersWork,
    EvaluationWork,
    Executor,
    ProgramExecutor,
    ReplicaFaultError,
    ReplicaMemoryError,
)
from weft.engine.jobs.lifecycle import Command, Lifecycle
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.prepare_job import prepare_job
from weft.engine.jobs.room import CapacityLimit, Placement, refuse_empty
from weft.engine.jobs.step_finisher import StepFinisher
from weft.engine.lookahead import LookaheadPlanner
from weft.engine.program_run import MicrobatchRun, ProgramRun
from weft.engine.recorder import ExportTo, RunRecorder
from weft.engine.resume import check_job_inputs, check_recorded, job_settings, open_run_directory
from weft.engine.timeline import TimelineRecorder
from weft.errors import ConfigError, JobError, StorageError, WeftError
from weft.job_state import JobState, Reason, ReasonCode
from weft.objectives.objective import MeanScores
from weft.plan.admit import Budget
from weft.plan.cost.shape import capacities
from weft.plan.pack import pack
from weft.plan.planner import PlanFunction, Planner
from weft.plan.types import Limits
from weft.settings import describe
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.spec.run import Capacity
from weft.store.run_dir import RunDirectory, RunRecord
from weft.store.wall_clock import Activity, TimeSplit, WallClock

if TYPE_CHECKING:
    from weft.data.load import Prompt
    from weft.engine.inference.generate import Answer
    from weft.model.backbone import Backbone
    from weft.spec.sampling import Decoding

RUN_STOPPED = Reason(ReasonCode.RUN_STOPPED, "the run was stopped")


class Engine:
    def __init__(
        self,
        replica: Executor | Backbone | BackboneSpec | str,
        *,
        capacity: Capacity = "auto",
        longest: int = 0,
        planner: PlanFunction = pack,
        max_jobs: int | None = None,
        job_memory: int | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        wall: WallClock | None = None,
    ) -> None:
        """Nothing is written until `keep_in` names a directory; read results from `adapter_of`.

        `replica`: an executor, or a backbone in this process, which is loaded if only its name or description is given.
        A microbatch has at most `capacity` tokens; auto: what suits the device and holds a sample of `longest`. At most
        `max_jobs` train at a time, and their adapters with optimizers take at most `job_memory` bytes. Default: as many
        as there is room for. When not all fit, tenants get tokens by weight.
        `wall` counts where the time goes, from when the command was given; default: from now.
        """
        refuse_empty(capacity, max_jobs)
        self.timeline = TimelineRecorder(wall)
        wall = self.timeline.wall
        with wall.spending(Activity.LOADING):
            self.executor = executor = executor_on(replica)
        self.jobs: dict[str, LiveJob] = {}
        self.max_jobs = max_jobs
        self._room = CapacityLimit(executor, capacities(capacity, executor.facts.device_kind, longest), self.jobs)
        self._placement = Placement(
            executor,
            self.jobs,
            max_jobs=max_jobs,
            job_memory=job_memory,
            weights=tenant_weights or {},
            timeline=self.timeline,
        )
        self._plans = LookaheadPlanner(planner, self.timeline)
        self._keeper = RunRecorder(executor, self._room, wall)
        self._lifecycle = Lifecycle(
            executor,
            self.jobs,
            room=self._room,
            placement=self._placement,
            keeper=self._keeper,
            timeline=self.timeline,
        )
        self._lifecycle.transitions.sync_progress = self.sync_progress
        self._step_finisher = StepFinisher(self._lifecycle)
        self._is_capacity_free = capacity == "auto"
        self._own_directory: RunDirectory | None = None
        """Run directory in which this engine records its jobs; None where a caller records them."""
        self._commands: deque[Command] = deque()
        self._events = EventQueue()
        self._program: ProgramRun | None = None
        self._mid_update = False
        """True while jobs are further than their counts; stays true if that is interrupted."""
        self._stopping = False
        self._has_released = False
        """True if a job may go further than the current program was planned for."""

    @property
    def planner(self) -> Planner:
        return self._plans.planner

    @property
    def num_replicas(self) -> int:
        return 1

    @property
    def layout(self) -> str:
        return str(self.executor.facts.layout)

    @property
    def limits(self) -> Limits:
        return self._room.limits

    @property
    def row_tile(self) -> int:
        return self._room.row_tile

    def submit(self, spec: JobSpec, data: JobData | None = None, *, base_dir: Path | str = ".") -> None:
        """Adds a job. Bad data or an adapter that does not fit raises here and changes nothing for other jobs. Paths
        are relative to `base_dir`. A job of the run directory continues from its last checkpoint, with the changes that
        `weft train --resume` accepts."""
        if not isinstance(spec, JobSpec):
            raise ConfigError(f"expected a Job, got {describe(spec)}.")
        if spec.name in self.jobs:
            raise ConfigError(f"there is already a job {spec.name!r}.", where="name")
        if self._own_directory is not None:
            check_recorded(spec, self._own_directory)
        job = self._checked(spec, data, Path(base_dir))
        try:
            if self._own_directory is not None:
                check_job_inputs(spec.name, job.inputs, self._own_directory)
                self._own_directory.write_job(spec.name, job_settings(spec))
        except WeftError:
            self.executor.drop(spec.name)
            raise
        self.jobs[spec.name] = job
        self._commands.append(Command("start", spec.name))

    def check(self, spec: JobSpec, data: JobData | None = None, *, base_dir: Path | str = ".") -> LiveJob:
        """The job that `submit` would add, or its error; the engine does not keep it."""
        job = self._checked(spec, data, Path(base_dir))
        self.executor.drop(spec.name)
        return job

    def bytes_of(self, job: LiveJob) -> int:
        return self._placement.bytes_of(job)

    def budget(self, adapters: Collection[AdapterSpec]) -> Budget:
        return self._placement.budget(self.limits.capacity, adapters)

    def keep_in(self, directory: RunDirectory | Path | str) -> None:
        """Writes metrics, checkpoints and adapters there, and continues from what it holds; call it before `events`."""
        if not isinstance(directory, RunDirectory):
            now = RunRecord(base_model=self.executor.facts.base_model, capacity=self._room.requested)
            directory = self._own_directory = open_run_directory(
                Path(directory), now, list(self.jobs.values()), self.executor, any_capacity=self._is_capacity_free
            )
        self._keeper.keep_in(directory)

    def cancel(self, name: str) -> None:
        """Ends a job; its slot is free at the next step boundary."""
        self._command("cancel", name)

    def pause(self, name: str) -> None:
        """Keeps a job at its last step boundary; on resume its begun global batch runs again."""
        self._command("pause", name)

    def resume(self, name: str) -> None:
        self._command("resume", name)

    def hold(self, name: str, step: int) -> None:
        """Stops a job at this step for now; it keeps its seat. `events` ends once no job can continue; hold the job at
        a later step, and the next call trains it further."""
        job, progress = self._job(name), self._job(name).progress
        if job.begun_step is not None and step < job.begun_step:
            self.sync_progress()
        before, progress.hold_step = progress.hold_step, min(max(step, progress.step), progress.num_steps)
        self._has_released |= progress.hold_step > before

    def hold_steps(self, name: str) -> None:
        """Stops a job where it is, so that all requests see the same weights."""
        self.hold(name, 0)

    def run(self) -> dict[str, LiveJob]:
        for _ in self.events():
            pass
        return self.jobs

    def stop(self) -> None:
        self._stopping = True

    def events(self) -> Iterator[Event]:
        """Trains and yields what happens; ends when no job can continue."""
        if self._mid_update:
            raise JobError(
                "training was interrupted in the middle of a step, so what is in memory is no longer exact.",
                hint="Make a new engine; with the same run directory its jobs go on from their last checkpoints.",
            )
        yield from self._emit()
        while not self._stopping:
            if self._program is None or not self._program.is_under_way:
                yield from self._finish_program()
            yield from self._step_finisher.receive()
            while self._commands:
                # Completely: a caller that stops reading here must not leave half a command.
                yield from self._lifecycle.apply(self._commands.popleft())
            yield from self._lifecycle.admit()
            for job in self._lifecycle.with_due_work():
                yield from self._step_finisher.finish_step(job)
            training = self._lifecycle.running_next()
            if training:
                with self._placement.watched(self.limits.capacity):
                    yield from self._execute(training)
            elif self._step_finisher.evaluations.is_open:
                yield from self._step_finisher.evaluations.run_slice()
            elif self._keeper.files.is_writing:
                yield from self._step_finisher.receive(wait=True)
            elif not self._commands and (self._lifecycle.running() or not self._placement.waiting()):
                break
        yield from self._finish_program()
        if self._stopping:
            preempted = [job for job in self._placement.waiting() if job.status.has_started]
            yield from self._lifecycle.transitions.pause([*self._lifecycle.running(), *preempted], RUN_STOPPED)
            self._stopping = False
        while self._keeper.files.is_writing:
            yield from self._step_finisher.receive(wait=True)
        for job in list(self.jobs.values()):
            # The caller may not come back, and there may be room by now.
            if job.state is JobState.PAUSED and job.is_short_of_storage:
                yield from self._lifecycle.transitions.save_paused(job)
        try:
            self._keeper.write_timeline(self.timeline)
        except StorageError as error:
            yield JobWarning((), f"timeline: {error}")

    @property
    def time_split(self) -> TimeSplit:
        return self._keeper.time_split

    def adapter_of(self, name: str) -> dict[str, tuple[object, ...]]:
        """Current adapter tensors of a job by module path; LoRA's are (A, B)."""
        job = self._job(name)
        self.sync_progress()
        return dict(self.executor.adapter_of(job.name))

    def evaluate(self, name: str) -> MeanScores:
        work = EvaluationWork((self._job(name).name,), self.limits.capacity, self.row_tile)
        self.sync_progress()
        return self.executor.wait(self.executor.start(work)).parts[0].means

    def answer(self, name: str, prompts: Sequence[Prompt], decoding: Decoding) -> list[Answer]:
        work = AnswersWork({self._job(name).name: prompts}, decoding)
        self.sync_progress()
        return self.executor.wait(self.executor.start(work))[name]

    def export_adapter(self, name: str, directory: Path | str) -> None:
        """Writes a job's current adapter as a PEFT directory; its parent must exist."""
        job = self._job(name)
        self.sync_progress()
        self.executor.wait(self.executor.start(AdapterWork(job.name, Path(directory), best=False)))

    def export_checkpoints(self, to: ExportTo) -> None:
        """From now on, writes the adapter beside every checkpoint, before its event, to the path that `to` returns."""
        self._keeper.export_to = to

    def finish_files(self) -> None:
        """Waits for all writes; call it after leaving `events` early."""
        self._keeper.files.finish_all()

    def close(self) -> None:
        self.executor.close()

    def forget(self, name: str) -> None:
        """Drops a job that has ended or is paused, with its adapter and optimizer; its files stay."""
        job = self._job(name)
        if not (job.state.is_final or (job.state is JobState.PAUSED and not job.is_short_of_storage)):
            raise ConfigError(f"{name!r} has not ended; cancel it first.", where="name")
        # Commands that came too late are not for the next job of this name.
        for command in [known for known in self._commands if known.job == name]:
            self._commands.remove(command)
        del self.jobs[name]
        self.executor.drop(name)

    def fit_microbatches(self) -> list[Event]:
        """Before any microbatch has run: makes them smaller where they would leave too little memory for jobs."""
        return self._lifecycle.fit_microbatches()

    def shrink(self) -> bool:
        """Halves the capacity; False if a sample does not allow it."""
        return self._room.shrink()

    def lessen(self, longest: int) -> str | None:
        """After stages ran out of memory: halves the number of microbatches in flight, or else their size, as far as a
        sample of `longest` allows. Returns the message for the user; None if neither can be less."""
        return self._room.lessen(longest)

    def _execute(self, running: list[LiveJob]) -> Iterator[Event]:
        """Runs the next program until its end, or until other jobs are to train."""
        program = self._program
        limits = self._room.within(self._placement.in_flight(self.limits.capacity))
        if program is None or not program.continue_with(running, limits):
            kind = self.executor.run_kind if isinstance(self.executor, ProgramExecutor) else MicrobatchRun
            program = kind(self.executor, running, self._plans, limits, self.row_tile, self.timeline)
        self._program, self._has_released = program, False
        while names := program.next_jobs():
            done: list[Event] | None = None
            failure: Exception | None = None
            self._mid_update = True
            try:
                done = program.advance()
            except ReplicaMemoryError:
                pass
            except Exception as error:
                if isinstance(error, ReplicaFaultError) or program.is_mid_step:
                    raise
                failure = error
            self._mid_update = False
            if done is None:
                # Not in a handler, which would hold on to the tensors of what failed.
                jobs = self._lifecycle
                yield from jobs.free_memory(names) if failure is None else jobs.isolate_failure(names, failure)
                return
            self._note([*self._plans.pop_warnings(), *done])
            yield from self._emit()
            yield from self._step_finisher.receive()
            if self._is_outdated(running):
                return
            if self._step_finisher.evaluations.is_open:
                yield from self._step_finisher.evaluations.run_slice()
                if self._is_outdated(running):
                    return

    def _is_outdated(self, running: list[LiveJob]) -> bool:
        """True if a program for these jobs must not go on: something else comes first, or other jobs train next."""
        is_step_finished = all(job.is_running and job.is_step_finished for job in running)
        has_changed = self._has_released or running != self._lifecycle.running_next()
        return self._stopping or bool(self._commands) or has_changed or not is_step_finished

    def _finish_program(self) -> Iterator[Event]:
        if self._program is not None:
            self._count_started(self._program)
        self._program = None
        yield from self._emit()

    def sync_progress(self) -> None:
        """Counts steps that stages have begun, so that progress matches the tensors; their events come later."""
        if self._program is not None and self._program.is_under_way:
            self._count_started(self._program)

    def _count_started(self, program: ProgramRun) -> None:
        self._mid_update = True
        done = program.finish()
        self._mid_update = False
        self._note(done)

    def _note(self, done: Sequence[Event]) -> None:
        for event in done:
            if isinstance(event, StepDone):
                self._keeper.note_step(self.jobs[event.job], event)
                self.jobs[event.job].is_suspect = False
        self._events.add(done)

    def _emit(self) -> Iterator[Event]:
        """Yields finished steps; after each, does what is due at that step."""
        while self._events:
            event = self._events.next()
            yield event
            # The caller may have forgotten a job that failed before this event.
            job = self.jobs.get(event.job) if isinstance(event, StepDone) else None
            if job is not None and job.is_running and not self._events.has_step(job.name):
                yield from self._step_finisher.finish_step(job)

    def _checked(self, spec: JobSpec, data: JobData | None, base_dir: Path) -> LiveJob:
        """A job that the executor has added and that fits, at least alone."""
        with self.timeline.wall.spending(Activity.PREPARING):
            job = prepare_job(spec, data, self.executor, self.limits.capacity, base_dir)
        try:
            self._placement.check(job, self._room.least(job.longest))
        except WeftError:
            self.executor.drop(spec.name)
            raise
        return job

    def _command(self, action: Literal["cancel", "pause", "resume"], name: str) -> None:
        self._job(name)
        self._commands.append(Command(action, name))

    def _job(self, name: str) -> LiveJob:
        if name not in self.jobs:
            raise ConfigError(f"there is no job {name!r}; there are {', '.join(self.jobs) or 'none'}.")
        return self.jobs[name]
