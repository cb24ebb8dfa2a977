"""Runs a jobs file: everything is checked before anything is written, then all jobs train together."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from weft.data.chat_template import template_digest
from weft.data.dataset import JobData
from weft.data.load import find_sources, load_job_data
from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, LayoutDecided
from weft.engine.execute.data_ahead import DataAhead
from weft.engine.execute.memory import ExpectedJobs, load_within
from weft.engine.execute.protocol import ReplicaFaultError
from weft.engine.resume import Locate, job_settings
from weft.engine.run_engine import RunEngine
from weft.errors import ConfigError, DataError, StorageError, WeftError
from weft.job_state import JobState, Reason
from weft.plan.pack import planner_named
from weft.spec import JobSpec, RunSpec
from weft.store.run_dir import RunDirectory, RunRecord
from weft.store.wall_clock import Activity, WallClock

RunT = TypeVar("RunT", bound=RunSpec)
OnEvent = Callable[[Event], None]


BATCH_NOTE = "{job}: a batch of {asked:,} samples is more than its data has; every step takes all {all:,}."

WARMUP_NOTE = "{job}: all of its {all:,} steps are warm-up (warmup_steps {warmup:g}), below the learning rate."


@dataclass
class PreparedRun:
    """A run whose backbone, data and adapters are loaded and fit together."""

    spec: RunSpec
    """Settings, with a number as capacity."""
    engine: RunEngine
    data: dict[str, JobData] = field(default_factory=dict)
    failed: dict[str, WeftError] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    clock: datetime.datetime = field(default_factory=datetime.datetime.now)


def load_engine(
    spec: RunT, jobs: Sequence[JobSpec], wall: WallClock | None = None
) -> tuple[RunT, Engine, tuple[str, ...]]:
    """An engine on the backbone of a run, with the run's settings and without jobs, and notes for the user. `jobs`:
    those to come, or some of each kind. In the returned run a capacity of `auto` is the engine's number, so that all
    that follows agrees on it. All time that `wall` has seen so far counts as loading."""
    wall = wall or WallClock()
    expected = ExpectedJobs.of(jobs, spec.max_jobs)
    backbone, notes = load_within(spec.backbone, spec.memory_limit, expected)
    wall.add_start(Activity.LOADING)
    engine = Engine(
        backbone,
        capacity=spec.capacity,
        longest=max(job.max_length for job in jobs),
        planner=planner_named(spec.planner),
        max_jobs=spec.max_jobs,
        tenant_weights=spec.tenant_weights,
        wall=wall,
    )
    return dataclasses.replace(spec, capacity=engine.limits.capacity), engine, notes


OpenEngine = Callable[[RunSpec, Sequence[JobSpec], WallClock | None], tuple[RunSpec, RunEngine, tuple[str, ...]]]


def prepare_run(
    spec: RunSpec,
    *,
    base_dir: Path,
    keep_going: bool = False,
    skip: frozenset[str] = frozenset(),
    clock: datetime.datetime | None = None,
    locate: Locate = str,
    wall: WallClock | None = None,
    open_engine: OpenEngine = load_engine,
    ahead: DataAhead | None = None,
) -> PreparedRun:
    """Loads and checks everything and writes nothing.

    A job with bad data, or with an adapter that does not fit, raises; with `keep_going` it is set aside as failed and
    the others train. Jobs named in `skip` are left out. `clock`: when the run began, if earlier than now. `wall` has
    counted the time since the command; `open_engine` loads what trains the run; `ahead` prepares its data meanwhile.
    """
    if not keep_going:
        _check_sources(spec, base_dir, skip)
    spec, engine, notes = open_engine(spec, spec.jobs, wall)
    run = PreparedRun(spec, engine, notes=(*notes, *_idle_settings(spec)), clock=clock or datetime.datetime.now())
    for index, job in enumerate(spec.jobs):
        if job.name in skip:
            continue
        try:
            with engine.timeline.wall.spending(Activity.PREPARING):
                if ahead is not None:
                    ahead.wait(job.name)
                run.data[job.name] = load_job_data(job, engine.executor.tokenizer, base_dir, clock=run.clock)
            engine.submit(job, run.data[job.name], base_dir=base_dir)
            run.notes += engine.jobs[job.name].notes
            num_samples = run.data[job.name].train.num_groups
            num_steps = engine.jobs[job.name].num_steps
            if job.warmup_steps >= max(num_steps, 1):
                run.notes += (WARMUP_NOTE.format(job=job.name, warmup=job.warmup_steps, all=num_steps),)
            if job.batch_size > num_samples:
                run.notes += (BATCH_NOTE.format(job=job.name, asked=job.batch_size, all=num_samples),)
        except ConfigError as error:
            # A job that does not fit the backbone is a mistake in the file.
            setting = f"jobs.{index}.{error.where}" if error.where else f"jobs.{index}"
            located = error.at(locate(setting))
            if not keep_going:
                raise located from None
            run.failed[job.name] = located
        except ReplicaFaultError:
            raise
        except WeftError as error:
            if not keep_going:
                raise _of_job(error, job, spec) from None
            run.failed[job.name] = error
    if not engine.jobs and run.failed and not skip:
        raise next(iter(run.failed.values()))
    return run


def _idle_settings(spec: RunSpec) -> list[str]:
    """A note about each setting without effect, such as one that all jobs have from the defaults."""
    notes = [
        f"{job.name}: eval_steps has no effect without eval_data."
        for job in spec.jobs
        if job.eval_steps is not None and job.eval_data is None
    ]
    unknown = sorted(spec.tenant_weights.keys() - {job.tenant for job in spec.jobs})
    return notes + [f"tenant_weights: no job is of tenant {tenant}." for tenant in unknown]


def _check_sources(spec: RunSpec, base_dir: Path, skip: frozenset[str]) -> None:
    """DataError for missing data, before the model is loaded."""
    for job in spec.jobs:
        try:
            if job.name not in skip:
                find_sources(job, base_dir)
        except DataError as error:
            raise _of_job(error, job, spec) from None


def _of_job(error: WeftError, job: JobSpec, spec: RunSpec) -> WeftError:
    """The error, with the hint that other jobs could train without this data."""
    if not isinstance(error, DataError) or error.hint is not None or len(spec.jobs) == 1:
        return error
    return error.at(error.where, f"That is data of job {job.name}; --keep-going trains the others.")


def execute_run(
    run: PreparedRun, directory: RunDirectory, *, on_event: OnEvent, should_stop: Callable[[], bool] = lambda: False
) -> dict[str, JobState]:
    """Trains all jobs of a prepared run into a directory; returns their final states."""
    write_settings(run, directory)
    for name, error in run.failed.items():
        directory.write_status(name, JobState.FAILED, reason=Reason.of(error), can_retry=True)
        on_event(JobFailed(name, 0, Reason.of(error)))
    engine = run.engine
    engine.keep_in(directory)
    try:
        for event in engine.events():
            if isinstance(event, LayoutDecided) and event.has_moved:
                # A full disk is reported where a job's files cannot be written.
                with suppress(StorageError):
                    directory.write_run(directory.read_run().in_layout(event.layout))
            on_event(event)
            if should_stop():
                engine.stop()
    finally:
        engine.finish_files()
    states = {name: job.state for name, job in engine.jobs.items()}
    return {**dict.fromkeys(run.failed, JobState.FAILED), **states}


def write_settings(run: PreparedRun, directory: RunDirectory) -> None:
    """Records every job and the resolved run; the run last, because with it the run exists."""
    for job in run.spec.jobs:
        directory.write_job(job.name, job_settings(job))
    name = run.spec.run_name or directory.path.resolve().name
    write_record(directory, run.spec, run.engine, name, run.clock)


def write_record(
    directory: RunDirectory, spec: RunSpec, engine: RunEngine, name: str, clock: datetime.datetime
) -> None:
    """Writes run.json for a run that starts or continues; `clock`: when it began."""
    facts = engine.executor.facts
    record = RunRecord(
        run_name=name,
        base_model=spec.base_model,
        device=facts.device,
        dtype=facts.dtype,
        quantize=spec.quantize,
        kernels=facts.path,
        capacity=spec.capacity,
        jobs=tuple(job.name for job in spec.jobs),
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        template_clock=clock.isoformat(timespec="seconds"),
        template_digest=template_digest(engine.executor.tokenizer),
    )
    if RunDirectory.holds_run(directory.path):
        record = dataclasses.replace(record, layouts=directory.read_run().layouts)
    directory.write_run(record.in_layout(engine.layout))


def clock_of(record: RunRecord) -> datetime.datetime | None:
    """Time for the chat templates of a recorded run; None if not recorded."""
    return None if record.template_clock is None else datetime.datetime.fromisoformat(record.template_clock)
