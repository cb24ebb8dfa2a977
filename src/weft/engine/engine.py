"""Executes programs on a backbone, for jobs that come and go.

`submit`, `cancel`, `pause` and `resume` may be called at any time, from any thread and between events; they take effect
at the next step boundary. The backbone is never reloaded and no other job notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from weft.backbone.backbone import Backbone
from weft.backbone.load import load_backbone
from weft.data.dataset import JobData, load_job_data
from weft.engine.attach import adapter_dir
from weft.engine.evaluate import mean_losses
from weft.engine.events import (
    EvalDone,
    Event,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobResumed,
    JobStarted,
    JobSucceeded,
    JobWarning,
    MicrobatchDone,
    StepDone,
)
from weft.engine.keeper import Keeper
from weft.engine.live_job import JobState, LiveJob
from weft.engine.step import run_microbatch
from weft.engine.timeline import Timeline
from weft.errors import CheckpointError, ConfigError, DataError, StorageError
from weft.plan.check import violations
from weft.plan.pack import pack
from weft.plan.types import ForwardBackward, Limits, Planner, Step
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.store.peft_files import read_adapter
from weft.store.run_dir import RunDirectory


@dataclass(frozen=True)
class _Command:
    """Something a user asked for, to be done at the next step boundary."""

    action: Literal["start", "cancel", "pause", "resume"]
    job: str


class Engine:
    """Trains any number of jobs together on one backbone."""

    def __init__(
        self,
        backbone: Backbone | BackboneSpec | str,
        *,
        capacity: int = 2048,
        planner: Planner = pack,
    ) -> None:
        """Nothing is written until `keep_in` names a directory; read results from `adapter_of`."""
        if isinstance(backbone, str):
            backbone = BackboneSpec(backbone)
        self.backbone = load_backbone(backbone) if isinstance(backbone, BackboneSpec) else backbone
        self.limits = Limits(capacity)
        self.row_tile = self.backbone.row_tile(capacity)
        self.jobs: dict[str, LiveJob] = {}
        self.timeline = Timeline()
        self._planner = planner
        self._keeper = Keeper(self.backbone, {"capacity": capacity, "row_tile": self.row_tile})
        self._commands: deque[_Command] = deque()
        self._stopping = False

    def submit(self, spec: JobSpec, data: JobData | None = None, *, base_dir: Path | str = ".") -> None:
        """Adds a job. Bad data or an adapter that does not fit raises here and changes nothing for the others.

        Paths are relative to `base_dir`. A job found in the run directory goes on from its last checkpoint.
        """
        if spec.name in self.jobs:
            raise ConfigError(f"there is already a job {spec.name!r}.", where="name")
        self._check_length(spec)
        if data is None:
            data = load_job_data(spec, self.backbone.tokenizer, Path(base_dir))
        self._check_samples(spec, data)
        if spec.init_adapter is None:
            adapter = self.backbone.new_adapter(spec.adapter, spec.seed)
        else:
            path = adapter_dir(Path(base_dir) / spec.init_adapter)
            stored, tensors, _ = read_adapter(path)
            if spec.adapter == AdapterSpec():
                spec = replace(spec, adapter=stored)
            adapter = self.backbone.new_adapter(spec.adapter, spec.seed)
            adapter.load(tensors, str(path))
        job = LiveJob(spec, data, adapter)
        self.jobs[spec.name] = job
        self._commands.append(_Command("start", spec.name))

    def keep_in(self, directory: RunDirectory | Path | str) -> None:
        """Writes metrics, checkpoints and adapters there, and goes on from what is there; call it before `events`."""
        if not isinstance(directory, RunDirectory):
            path = Path(directory)
            directory = RunDirectory.open(path, resume=(path / "run.json").exists())
            directory.write_run({"run_name": path.resolve().name, "base_model": self.backbone.name, "jobs": []})
        self._keeper.run_dir = directory

    def cancel(self, name: str) -> None:
        """Takes a job off; its slot is free at the next step boundary."""
        self._command("cancel", name)

    def pause(self, name: str) -> None:
        """Keeps a job at its last step boundary; what has run of its next global batch is run again on resume."""
        self._command("pause", name)

    def resume(self, name: str) -> None:
        """Lets a paused job go on."""
        self._command("resume", name)

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
        while not self._stopping:
            while self._commands:
                # Done before it is told: a reader that leaves here must not leave half a command behind.
                yield from list(self._obey(self._commands.popleft()))
            for job in self._running():
                if job.settled_step != job.step:
                    yield from self._settle(job)
            running = self._running()
            if running:
                yield from self._execute(running)
            elif not self._commands:
                break
        if self._stopping:
            self._stopping = False
            for job in self._running():
                yield from list(self._pause(job, "the run was stopped"))
        try:
            self._keeper.write_timeline(self.timeline)
        except StorageError as error:
            yield JobWarning("timeline", str(error))

    def adapter_of(self, name: str) -> dict[str, tuple[object, object]]:
        """(A, B) of a job by module path, as they are now."""
        return dict(self._job(name).adapter.tensors())

    def _running(self) -> list[LiveJob]:
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self.jobs.values()) if job.state is JobState.RUNNING]

    def _execute(self, running: list[LiveJob]) -> Iterator[Event]:
        """Plans the next stretch and runs it, until its end or until something changes who trains."""
        queues = [job.queue() for job in running]
        with self.timeline.span("plan"):
            program = self._planner(queues, self.limits)
        problems = violations(program, queues, self.limits)
        assert program.instructions and not problems, problems
        for instruction in program.instructions:
            if isinstance(instruction, ForwardBackward):
                yield self._forward_backward(instruction)
            else:
                yield from self._step(instruction)
            if self._stopping or self._commands or any(job.state is not JobState.RUNNING for job in running):
                return

    def _forward_backward(self, instruction: ForwardBackward) -> Event:
        microbatch = instruction.microbatch
        shares: dict[str, int] = {}
        for segment in microbatch.segments:
            shares[segment.job] = shares.get(segment.job, 0) + segment.length
        with self.timeline.span("forward_backward", tokens=microbatch.num_tokens, jobs=shares) as args:
            args["rows"] = run_microbatch(self.backbone, self.jobs, microbatch, self.row_tile)
        duration = self.timeline.spans[-1].duration_s
        return MicrobatchDone(", ".join(shares), microbatch.num_tokens, args["rows"], duration)

    def _step(self, instruction: Step) -> Iterator[Event]:
        job = self.jobs[instruction.job]
        with self.timeline.span("step", jobs={job.spec.name: 0}):
            result = job.take_step()
        event = StepDone(
            job.spec.name,
            job.step,
            job.num_steps,
            job.epoch,
            result.loss,
            result.grad_norm,
            result.learning_rate,
            result.tokens,
            job.num_tokens,
            self.timeline.now(),
            result.skipped,
        )
        self._keeper.note_step(job, event)
        job.diverged = job.divergence(result)
        yield event
        yield from self._settle(job)

    def _settle(self, job: LiveJob) -> Iterator[Event]:
        """Does what the last step left to do: metrics, evaluation, checkpoint, and the end of the job.

        A disk that is full pauses the job; once resumed, it goes on with what was not done.
        """
        if job.diverged:
            remarks = self._leave(job, JobState.FAILED, job.diverged)
            yield from [*remarks, JobFailed(job.spec.name, job.step, job.diverged)]
            return
        try:
            self._keeper.flush(job)
            if job.is_eval_due():
                yield self._evaluate(job)
                self._keeper.flush(job)
            if job.is_save_due():
                with self.timeline.span("checkpoint", jobs={job.spec.name: 0}):
                    saved = list(self._keeper.save(job, self.timeline.now()))
                job.saved_step = job.step
                yield from saved
            if job.is_complete:
                yield from self._finish(job)
            job.settled_step = job.step
        except StorageError as error:
            # The weights in memory are good; what cannot go on is writing. The neighbours may write elsewhere.
            yield from list(self._pause(job, str(error), save=False))

    def _evaluate(self, job: LiveJob) -> Event:
        assert job.data.eval is not None
        with self.timeline.span("eval", jobs={job.spec.name: job.data.eval.summary.num_tokens}):
            request = (job.slot, job.data.eval.samples)
            (loss,) = mean_losses(self.backbone, [request], self.limits.capacity, self.row_tile)
        is_best = job.record_eval(loss)
        runtime = self.timeline.spans[-1].duration_s
        event = EvalDone(job.spec.name, job.step, job.epoch, loss, runtime, is_best, self.timeline.now())
        self._keeper.note_eval(job, event)
        return event

    def _finish(self, job: LiveJob) -> list[Event]:
        job.use_best()
        adapter_dir = self._keeper.write_adapter(job)
        remarks = self._leave(job, JobState.SUCCEEDED)
        job.settled_step = job.step
        return [*remarks, JobSucceeded(job.spec.name, job.step, adapter_dir, job.stopped_early)]

    def _leave(self, job: LiveJob, state: JobState, reason: str | None = None) -> list[Event]:
        """The job's slot becomes free for others; what cannot be written about that is only a warning."""
        if job.slot is not None:
            self.backbone.detach(job.slot)
            job.slot = None
        job.state, job.reason = state, reason
        try:
            self._keeper.flush(job)
            self._keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            return [JobWarning(job.spec.name, f"its end could not be recorded: {error}")]
        return []

    def _pause(self, job: LiveJob, reason: str | None, *, save: bool = True) -> Iterator[Event]:
        job.state, job.reason = JobState.PAUSED, reason
        job.rewind()
        try:
            if save:
                yield from self._keeper.save(job, self.timeline.now())
            self._keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            job.reason = str(error)
        yield JobPaused(job.spec.name, job.step, job.reason)

    def _obey(self, command: _Command) -> Iterator[Event]:
        """Carries out what a user asked for."""
        job = self.jobs[command.job]
        if job.state.is_final:
            return
        if command.action == "start" or (command.action == "resume" and job.slot is None):
            yield from self._start(job)
        elif command.action == "cancel":
            yield from self._leave(job, JobState.CANCELLED, "cancelled")
            yield JobCancelled(job.spec.name, job.step)
        elif command.action == "pause" and job.state is JobState.RUNNING:
            yield from self._pause(job, None)
        elif command.action == "resume" and job.state is JobState.PAUSED:
            job.state, job.reason = JobState.RUNNING, None
            yield JobResumed(job.spec.name, job.step)

    def _start(self, job: LiveJob) -> Iterator[Event]:
        """Gives the job a slot, and its state from the run directory."""
        try:
            yield from self._keeper.open(job)
            job.state, job.reason = JobState.RUNNING, None
            self._keeper.write_status(job, self.timeline.now())
        except StorageError as error:
            job.state, job.reason = JobState.PAUSED, str(error)
            yield JobPaused(job.spec.name, job.step, job.reason)
            return
        except (DataError, CheckpointError) as error:
            yield from self._leave(job, JobState.FAILED, str(error))
            yield JobFailed(job.spec.name, job.step, str(error))
            return
        self.timeline.offset_s = max(self.timeline.offset_s, self._keeper.elapsed_s(job))
        job.slot = self.backbone.attach(job.adapter)
        # A job restored at its end still has to write its adapter.
        job.settled_step = -1 if job.is_complete else job.step
        yield JobStarted(job.spec.name, job.step, job.num_steps)

    def _command(self, action: Literal["cancel", "pause", "resume"], name: str) -> None:
        self._job(name)
        self._commands.append(_Command(action, name))

    def _job(self, name: str) -> LiveJob:
        if name not in self.jobs:
            raise ConfigError(f"there is no job {name!r}; there are {', '.join(self.jobs) or 'none'}.")
        return self.jobs[name]

    def _check_length(self, spec: JobSpec) -> None:
        for limit, what in ((self.limits.capacity, "capacity"), (self.backbone.max_positions, "backbone's positions")):
            if spec.max_length > limit:
                raise ConfigError(f"max_length {spec.max_length} is above the {what} ({limit}).", where="max_length")

    def _check_samples(self, spec: JobSpec, data: JobData) -> None:
        """Refuses here what would raise inside a microbatch and take the neighbours with it."""
        longest = min(self.limits.capacity, self.backbone.max_positions)
        vocabulary = self.backbone.vocabulary
        for sample in [*data.train.samples, *(data.eval.samples if data.eval else ())]:
            if sample.length > longest:
                found = f"a sample of {sample.length} tokens is above the {longest} that fit the capacity and backbone"
            elif not sample.num_supervised:
                found = "a sample has no supervised token"
            elif sample.tokens.min() < 0 or sample.tokens.max() >= vocabulary:
                found = f"a sample has a token outside 0 to {vocabulary - 1}, which is all the backbone knows"
            else:
                continue
            raise DataError(f"{found}.", where=spec.name)
