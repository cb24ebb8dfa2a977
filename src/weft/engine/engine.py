"""Executes programs on a replica of the backbone, for jobs that come and go.

`submit`, `cancel`, `pause` and `resume` may be called at any time, from any thread and between events; they take effect
at the next step boundary. The backbone is never reloaded and no other job notices. Jobs without room wait, or give way
to a higher priority and go on later; no result depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.data.dataset import JobData
from weft.engine.capacity import CapacityLimit, refuse_empty
from weft.engine.events import Event, JobWarning, StepDone
from weft.engine.execute.local import executor_on
from weft.engine.execute.protocol import (
    AnswersWork,
    EvaluationWork,
    Executor,
    ReplicaFaultError,
    ReplicaMemoryError,
)
from weft.engine.jobs.lifecycle import Command, Lifecycle
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.placement import Placement
from weft.engine.jobs.prepare_job import prepare_job
from weft.engine.jobs.settle import StepFinisher
from weft.engine.lookahead import LookaheadPlanner
from weft.engine.program_run import ProgramRun
from weft.engine.recorder import ExportTo, RunRecorder
from weft.engine.resume import check_recorded, job_settings, open_run_directory
from weft.engine.staged_run import StagedRun
from weft.engine.timeline import TimelineRecorder
from weft.engine.untold import EventQueue
from weft.errors import ConfigError, JobError, StorageError, WeftError
from weft.job_state import JobState, Reason, ReasonCode
from weft.objectives.metrics import MeanScores
from weft.plan.admit import Budget
from weft.plan.cost.rows import capacities
from weft.plan.pack import pack
from weft.plan.program import Planner
from weft.plan.types import Limits
from weft.settings.fields import describe
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.spec.run import Capacity
from weft.store.run_dir import RunDirectory
from weft.store.run_record import RunRecord
from weft.wall_clock import Activity, TimeSplit, WallClock

if TYPE_CHECKING:
    from weft.data.prompts import Prompt
    from weft.engine.inference.answers import Answer
    from weft.engine.inference.generate import Decoding
    from weft.model.backbone import Backbone

RUN_STOPPED = Reason(ReasonCode.RUN_STOPPED, "the run was stopped")


class Engine:
    """Trains any number of jobs together on one backbone."""

    def __init__(
        self,
        replica: Executor | Backbone | BackboneSpec | str,
        *,
        capacity: Capacity = "auto",
        longest: int = 0,
        planner: Planner = pack,
        max_jobs: int | None = None,
        job_memory: int | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        wall: WallClock | None = None,
    ) -> None:
        """Nothing is written until `keep_in` names a directory; read results from `adapter_of`.

        `replica`: an executor, or a backbone in this process, which is loaded if only its name or description is given.
        A microbatch has at most `capacity` tokens; auto: what suits the device and holds a sample of `longest`. At most
        `max_jobs` train at a time, and their adapters with optimizers take at most `job_memory` bytes. Default: as many
        as there is room for on a GPU; all of them on a CPU. When not all fit, tenants get tokens by weight.
        `wall` counts where the time goes, from when the command was given; default: from now.
        """
        refuse_empty(capacity, max_jobs)
        self.timeline = TimelineRecorder(wall)
        wall = self.timeline.wall
        with wall.spending(Activity.LOADING):
            self.executor = executor = executor_on(replica)
        self.jobs: dict[str, LiveJob] = {}
        self.planner = planner
        self.max_jobs = max_jobs
        self._room = CapacityLimit(executor, capacities(capacity, executor.facts.device_kind, longest), self.jobs)
        self._places = Placement(
            executor, self.jobs, max_jobs=max_jobs, job_memory=job_memory, weights=tenant_weights or {}
        )
        self._plans = LookaheadPlanner(planner, self.timeline)
        self._keeper = RunRecorder(executor, self._room, wall)
        self._lifecycle = Lifecycle(
            executor,
            self.jobs,
            room=self._room,
            places=self._places,
            keeper=self._keeper,
            timeline=self.timeline,
        )
        self._lifecycle.transitions.land = self._land
        self._step_finisher = StepFinisher(self._lifecycle)
        self._is_capacity_free = capacity == "auto"
        self._own_directory: RunDirectory | None = None
        """The run directory, if nobody else records there which jobs it has."""
        self._commands: deque[Command] = deque()
        self._untold = EventQueue()
        """Steps that are done and not yet told."""
        self._program: ProgramRun | StagedRun | None = None
        """The last one; a microbatch of it may still run."""
        self._mid_update = False
        """Something is under way of which jobs have not been told; for good, if it is interrupted."""
        self._stopping = False
        self._has_released = False
        """A job may go further than the program that runs was planned for."""

    @property
    def num_replicas(self) -> int:
        """It trains on one."""
        return 1

    @property
    def layout(self) -> str:
        """How its replicas lie over devices now."""
        return str(self.executor.facts.layout)

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

        Paths are relative to `base_dir`. A job found in the run directory goes on from its last checkpoint; it may have
        changed where `weft train --resume` takes changes over.
        """
        if not isinstance(spec, JobSpec):
            raise ConfigError(f"expected a Job, got {describe(spec)}.")
        if spec.name in self.jobs:
            raise ConfigError(f"there is already a job {spec.name!r}.", where="name")
        if self._own_directory is not None:
            check_recorded(spec, self._own_directory)
        job = self._checked(spec, data, Path(base_dir))
        try:
            if self._own_directory is not None:
                self._own_directory.write_job(spec.name, job_settings(spec))
        except WeftError:
            self.executor.drop(spec.name)
            raise
        self.jobs[spec.name] = job
        self._commands.append(Command("start", spec.name))

    def check(self, spec: JobSpec, data: JobData | None = None, *, base_dir: Path | str = ".") -> LiveJob:
        """What `submit` would make of a job, or what it would raise; the engine does not keep it."""
        job = self._checked(spec, data, Path(base_dir))
        self.executor.drop(spec.name)
        return job

    def bytes_of(self, job: LiveJob) -> int:
        """Memory that a job takes here while it has a place."""
        return self._places.bytes_of(job)

    def budget(self, adapters: Collection[AdapterSpec]) -> Budget:
        """What jobs with such adapters may take here together."""
        return self._places.budget(self.limits.capacity, adapters)

    def keep_in(self, directory: RunDirectory | Path | str) -> None:
        """Writes metrics, checkpoints and adapters there, and goes on from what is there; call it before `events`."""
        if not isinstance(directory, RunDirectory):
            now = RunRecord(base_model=self.executor.facts.base_model, capacity=self._room.asked)
            jobs = [job.submitted for job in list(self.jobs.values())]
            directory = self._own_directory = open_run_directory(
                Path(directory), now, jobs, any_capacity=self._is_capacity_free
            )
        self._keeper.keep_in(directory)

    def cancel(self, name: str) -> None:
        """Takes a job off; its slot is free at the next step boundary."""
        self._command("cancel", name)

    def pause(self, name: str) -> None:
        """Keeps a job at its last step boundary; what has run of its next global batch is run again on resume."""
        self._command("pause", name)

    def resume(self, name: str) -> None:
        """Lets a paused job go on."""
        self._command("resume", name)

    def hold(self, name: str, step: int) -> None:
        """Lets a job take no step beyond this one for now; it keeps its place.

        `events` ends once no job can go on; hold the job at a later step, and it goes on with the next call.
        """
        job, progress = self._job(name), self._job(name).progress
        if job.begun_step is not None and step < job.begun_step:
            self._land()
        before, progress.hold_step = progress.hold_step, min(max(step, progress.step), progress.num_steps)
        self._has_released |= progress.hold_step > before

    def hold_steps(self, name: str) -> None:
        """Lets a job take no further step, so that all that is asked of it is of the same weights."""
        self.hold(name, 0)

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
        if self._mid_update:
            raise JobError(
                "training was interrupted in the middle of a step, so what is in memory is no longer exact.",
                hint="Make a new engine; with the same run directory its jobs go on from their last checkpoints.",
            )
        yield from self._tell()
        while not self._stopping:
            if self._program is None or not self._program.goes_on:
                yield from self._finish_program()
            yield from self._step_finisher.receive()
            while self._commands:
                # Done before it is told: a reader that leaves here must not leave half a command behind.
                yield from self._lifecycle.obey(self._commands.popleft())
            yield from self._lifecycle.admit()
            for job in self._lifecycle.unsettled():
                yield from self._step_finisher.settle(job)
            training = self._lifecycle.running_next()
            if training:
                with self._places.watched():
                    yield from self._execute(training)
            elif self._keeper.files.is_writing:
                yield from self._step_finisher.receive(wait=True)
            elif not self._commands and (self._lifecycle.running() or not self._places.waiting()):
                break
        yield from self._finish_program()
        if self._stopping:
            preempted = [job for job in self._places.waiting() if job.status.has_started]
            yield from self._lifecycle.transitions.pause([*self._lifecycle.running(), *preempted], RUN_STOPPED)
            self._stopping = False
        while self._keeper.files.is_writing:
            yield from self._step_finisher.receive(wait=True)
        for job in list(self.jobs.values()):
            # Nobody knows whether the reader of these events will come back: there may be room by now.
            if job.state is JobState.PAUSED and job.is_short_of_storage:
                yield from self._lifecycle.transitions.save_paused(job)
        try:
            self._keeper.write_timeline(self.timeline)
        except StorageError as error:
            yield JobWarning((), f"timeline: {error}")

    @property
    def time_split(self) -> TimeSplit:
        """Where the wall clock of the run went so far, over all its sessions."""
        return self._keeper.time_split

    def adapter_of(self, name: str) -> dict[str, tuple[object, ...]]:
        """The adapter's tensors of a job by module path, as they are now; LoRA's are (A, B)."""
        job = self._job(name)
        self._land()
        return dict(self.executor.adapter_of(job.name))

    def evaluate(self, name: str) -> MeanScores:
        """How a job does on its evaluation data as it is now."""
        work = EvaluationWork((self._job(name).name,), self.limits.capacity, self.row_tile)
        self._land()
        return self.executor.wait(self.executor.start(work)).means[0]

    def answer(self, name: str, prompts: Sequence[Prompt], decoding: Decoding) -> list[Answer]:
        """What a job answers to prompts as it is now."""
        work = AnswersWork({self._job(name).name: prompts}, decoding)
        self._land()
        return self.executor.wait(self.executor.start(work))[name]

    def export_adapter(self, name: str, directory: Path | str) -> None:
        """Writes a job's adapter, as it is now, as a PEFT directory; its parent must exist."""
        job = self._job(name)
        self._land()
        self._keeper.export_adapter(job, Path(directory))

    def export_checkpoints(self, to: ExportTo) -> None:
        """From now on, writes the adapter beside every checkpoint, before that is told, to where `to` says."""
        self._keeper.export_to = to

    def finish_files(self) -> None:
        """Waits for all that is being written; whoever stops reading events does so before leaving the directory."""
        self._keeper.files.finish_all()

    def close(self) -> None:
        """Ends what else belongs to the replica, such as other processes."""
        self.executor.close()

    def forget(self, name: str) -> None:
        """Lets go of a job that has ended, or is paused, with its adapter and optimizer; what is on disk stays."""
        job = self._job(name)
        if not (job.state.is_final or (job.state is JobState.PAUSED and not job.is_short_of_storage)):
            raise ConfigError(f"{name!r} has not ended; cancel it first.", where="name")
        # What was asked of it too late is not meant for the next job of this name.
        for command in [known for known in self._commands if known.job == name]:
            self._commands.remove(command)
        del self.jobs[name]
        self.executor.drop(name)

    def fit_microbatches(self) -> list[Event]:
        """Before any have run: smaller ones, where those asked for would leave too little memory for jobs."""
        return self._lifecycle.fit_microbatches()

    def shrink(self) -> bool:
        """Halves what a microbatch may hold; False if a sample is in the way."""
        return self._room.shrink()

    def _execute(self, running: list[LiveJob]) -> Iterator[Event]:
        """Plans the next program and runs it, until its end or until something changes who trains."""
        program = self._program
        if isinstance(program, StagedRun) and program.goes_on:
            program.go_on(running)
        else:
            kind = StagedRun if self.executor.facts.takes_programs else ProgramRun
            program = kind(self.executor, running, self._plans, self.limits, self.row_tile, self.timeline)
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
            yield from self._tell()
            yield from self._step_finisher.receive()
            is_settled = all(job.is_running and job.is_settled for job in running)
            has_changed = self._has_released or running != self._lifecycle.running_next()
            if self._stopping or self._commands or has_changed or not is_settled:
                return

    def _finish_program(self) -> Iterator[Event]:
        """Before anything else is decided: what has been started is counted."""
        if self._program is not None:
            self._count_started(self._program)
        self._program = None
        yield from self._tell()

    def _land(self) -> None:
        """Counts steps that stages have begun, so that jobs stand where their tensors do; they are told later."""
        if self._program is not None and self._program.goes_on:
            self._count_started(self._program)

    def _count_started(self, program: ProgramRun | StagedRun) -> None:
        self._mid_update = True
        done = program.finish()
        self._mid_update = False
        self._note(done)

    def _note(self, done: Sequence[Event]) -> None:
        """Notes what has been done, to be told."""
        for event in done:
            if isinstance(event, StepDone):
                self._keeper.note_step(self.jobs[event.job], event)
                self.jobs[event.job].is_suspect = False
        self._untold.add(done)

    def _tell(self) -> Iterator[Event]:
        """Tells what has been done, and settles each step once it is told."""
        while self._untold:
            event = self._untold.next()
            yield event
            # A reader may have forgotten a job that failed before this was told.
            job = self.jobs.get(event.job) if isinstance(event, StepDone) else None
            if job is not None and job.is_running and not self._untold.has_step(job.name):
                yield from self._step_finisher.settle(job)

    def _checked(self, spec: JobSpec, data: JobData | None, base_dir: Path) -> LiveJob:
        """A job that the executor knows and that fits, at least alone."""
        with self.timeline.wall.spending(Activity.PREPARING):
            job = prepare_job(spec, data, self.executor, self.limits.capacity, base_dir)
        try:
            self._places.check(job, self._room.least(job.longest))
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
