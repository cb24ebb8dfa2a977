"""`weft train` trains all jobs of a file together on one backbone."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from weft import processes
from weft.cli.layout_options import LayoutOptions
from weft.cli.options import (
    Cluster,
    Devices,
    DispatchBy,
    GpuType,
    Layout,
    Listen,
    Out,
    PipelineSchedule,
    ReplicaOptions,
    Replicas,
    open_for_reading,
    open_for_training,
    path_argument,
    print_join_command,
    print_note,
    run_location,
)
from weft.errors import ConfigError, StorageError, counted, size
from weft.report.readable import output_console, print_line
from weft.spec import RunSpec, load_run
from weft.spec.load import locate, located
from weft.store.wall_clock import Activity, WallClock, process_start_s

if TYPE_CHECKING:
    from weft.engine.preview import Preview
    from weft.engine.train import OpenEngine, PreparedRun
    from weft.model.resolve import ResolvedModel
    from weft.parallel.replicas.hosts import ReplicaHosts
    from weft.parallel.replicas.joined_stages import JoinedStages
    from weft.parallel.replicas.rank_group import RankGroup
    from weft.plan.choose_layout import LayoutOption
    from weft.plan.replan import Forecaster
    from weft.store.mirror import RunUrl
    from weft.store.run_dir import RunDirectory, RunFiles


def train(
    jobs_file: Annotated[Path, path_argument("The jobs file; `weft init` writes one to start from.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change: jobs.0.adapter.r=32")] = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output directory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, train nothing.")] = False,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going", help="Train the other jobs when one has bad data or an adapter that does not fit."
        ),
    ] = False,
    memory_limit: Annotated[
        str | None, typer.Option(help="Most GPU memory to take, such as 40GB or 0.5; short for memory_limit=…")
    ] = None,
    kernels: Annotated[str | None, typer.Option(help="auto, fused or reference; short for kernels=…")] = None,
    planner: Annotated[str | None, typer.Option(help="auto, greedy, exact or lorafusion; short for planner=…")] = None,
    replicas: Replicas = None,
    devices: Devices = None,
    cluster: Cluster = None,
    gpu_type: GpuType = None,
    listen: Listen = None,
    layout: Layout = None,
    schedule: PipelineSchedule = None,
    dispatch: DispatchBy = None,
) -> None:
    """Train all jobs of a file together on one backbone."""
    short = {"memory_limit": memory_limit, "kernels": kernels, "planner": planner}
    changes = (*(overrides or ()), *(f"{name}={value}" for name, value in short.items() if value is not None))
    spec = load_run(jobs_file, changes)
    location = out or run_location(spec.output_dir, locate("output_dir", jobs_file, changes))
    hosts = ReplicaOptions(None, devices, cluster, gpu_type, listen)
    options, stages = LayoutOptions.read(layout, replicas, hosts, schedule, dispatch)
    reasons: tuple[str, ...] = ()
    predicted: LayoutOption | None = None
    forecast: Forecaster | None = None
    model: ResolvedModel | None = None
    invocation = Invocation(("weft", "train", str(jobs_file), *changes), (*options.flags, *stages.flags))
    if stages.is_auto:
        from weft.model.resolve import resolve
        from weft.parallel.auto_layout import machine_here

        stages.check_alone(options.flags)
        model, machine = resolve(spec.backbone), machine_here(spec)
        forecast = stages.forecaster(spec, model, machine)
        stages, chosen = stages.choose(spec, model, jobs_file.parent, machine)
        reasons, predicted = chosen.lines, chosen.predicted
    elif not stages.chosen.is_one_device:
        if not dry_run:
            # Beside what this process imports itself, from the next line on.
            processes.prepare()
        from weft.model.resolve import resolve

        model = resolve(spec.backbone)
    with located(jobs_file, changes):
        stages.check(spec, options.flags, model)
    order = Order(spec, jobs_file, changes, keep_going, options, stages, invocation, model, forecast)
    console = output_console()
    for reason in reasons:
        print_line(console, f"layout    {reason}")
    if not invocation.flags and (idle := stages.idle_note(spec.device)) is not None:
        print_note(console, idle)
    if not dry_run:
        train_order(order, location, resume=resume)
    run = _checked(order, location, console, resume=resume)
    if run is None:
        return
    forecast_lines: tuple[str, ...] = ()
    if not reasons and stages.layout is not None:
        from weft.model.resolve import resolve
        from weft.parallel.auto_layout import machine_here, predicted_on

        model = model or resolve(spec.backbone)
        # There is no prediction for GPUs that are not in the hardware table.
        with suppress(ConfigError):
            predicted, _, forecast_lines = predicted_on(
                spec, model, stages.layout, jobs_file.parent, machine_here(spec)
            )
    if predicted is not None and predicted.layout.is_one_device:
        predicted = None
    _show_plan(run, forecast_lines, () if model is None else stages.notes(spec, model), predicted, console)


def train_order(order: Order, location: Path | RunUrl, *, resume: bool) -> NoReturn:
    """Trains the jobs and exits. After the loss of a stage all stages start again, from the jobs' checkpoints."""
    from weft.cli.watch import retry_on_replica_loss
    from weft.store.run_dir import RunDirectory

    console = output_console()
    notify = partial(print_note, console)
    is_staged = order.hosts is None and order.layout.stages is not None
    joined = order.layout.open_joined(order.spec.backbone, console) if is_staged else nullcontext()
    with open_for_training(location, resume=resume, notify=notify) as directory, joined as stage_hosts:
        order = replace(order, stage_hosts=stage_hosts)

        def attempt(is_later: bool, wall: WallClock, num_lessened: int = 0) -> int:
            resumes = RunDirectory.holds_run(directory) if is_later else resume
            less = replace(order, layout=order.layout.lessened(num_lessened)) if num_lessened else order
            return _train(less, directory, console, resume=resumes, location=location, wall=wall)

        wall = WallClock(process_start_s())
        code = retry_on_replica_loss(attempt, wall, notify) if is_staged else attempt(False, wall)
    raise typer.Exit(code)


@dataclass(frozen=True)
class Invocation:
    """A command as it was given, without --out, and the flags that a resumed run needs again."""

    words: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def resume_command(self, location: Path | RunUrl, *flags: str) -> str:
        return shlex.join([*self.words, "--out", str(location), "--resume", *flags, *self.flags])


@dataclass(frozen=True)
class PlannedPace:
    """A plan's prediction, to compare a run with."""

    step_s: float
    """Predicted seconds in which every job trains one global batch."""
    step_tokens: float

    def compared(self, seconds: float, num_tokens: int) -> tuple[tuple[str, str], ...]:
        """Labels and values of prediction and measurement, for `seconds` of computing on so many trained tokens."""
        if not num_tokens:
            return ()
        measured_s = seconds * self.step_tokens / num_tokens
        more = f"{measured_s / self.step_s - 1:+.0%}"
        return ("predicted", f"{self.step_s:,.3g} s a step"), ("measured", f"{measured_s:,.3g} s a step ({more})")


@dataclass(frozen=True)
class Order:
    spec: RunSpec
    jobs_file: Path
    overrides: tuple[str, ...]
    keep_going: bool
    replicas: ReplicaOptions
    layout: LayoutOptions
    invocation: Invocation
    model: ResolvedModel | None = None
    """The resolved backbone; None: the process that loads it resolves it."""
    forecast: Forecaster | None = None
    pace: PlannedPace | None = None
    """Prediction of the plan that the run executes, if there is one."""
    stage_hosts: JoinedStages | None = None

    @cached_property
    def hosts(self) -> ReplicaHosts | None:
        """Hosts of the replicas, if each has an engine of its own."""
        if self.forecast is not None:
            assert self.model is not None, "a layout that follows the jobs was planned for a model"
            return self.layout.in_ranks(self.model, self.spec.jobs)
        return self.replicas.hosts(self.spec.backbone) or self.layout.hosts(self.model, self.spec.jobs)

    def locate(self, setting: str) -> str:
        return locate(setting, self.jobs_file, self.overrides)


def _checked(order: Order, location: Path | RunUrl, console: Console, *, resume: bool) -> PreparedRun | None:
    """The run on one device, all of it checked and nothing written; None if there is nothing to resume."""
    from weft.store.run_dir import RunDirectory, RunFiles

    alone = replace(order, replicas=ReplicaOptions(), layout=LayoutOptions(), model=None, forecast=None)
    with open_for_reading(location) as directory:
        is_taken = RunDirectory.holds_run(directory)
        if resume or not is_taken:
            RunDirectory.check(directory, resume=resume)
        RunDirectory.check_writable(directory)
        order.replicas.check(order.spec.backbone)
        if resume:
            return _prepare_resumed(alone, RunFiles(directory), console)
    if is_taken:
        print_note(console, f"{location} holds a run: train with --resume, or into another --out")
    return _prepare(alone, console)


def _prepare_resumed(
    order: Order, files: RunFiles, console: Console, wall: WallClock | None = None
) -> PreparedRun | None:
    """The rest of the run in a directory, which it is compared with; None if every job has ended."""
    from weft.engine.resume import check_same_inputs, plan_resume, with_recorded_capacity
    from weft.engine.train import clock_of

    plan = plan_resume(order.spec, files, locate=order.locate)
    if len(plan.done) == len(order.spec.jobs):
        console.print("nothing to resume: every job has ended")
        return None
    order = replace(order, spec=with_recorded_capacity(order.spec, files))
    if plan.changes:
        print_line(console, f"takes over  {'; '.join(plan.changes)}")
    run = _prepare(order, console, plan.done, clock_of(files.read_run()), wall)
    check_same_inputs(run, files)
    return run


def _train(order: Order, out: Path, console: Console, *, resume: bool, location: Path | RunUrl, wall: WallClock) -> int:
    """Runs or resumes in the directory `out`, which the user knows as `location`; returns the exit code."""
    from weft.cli.watch import conclude
    from weft.store.run_dir import RunDirectory

    RunDirectory.check(out, resume=resume)
    if resume:
        with RunDirectory.open(out, resume=True) as directory:
            resumed = _prepare_resumed(order, directory, console, wall)
            if resumed is not None:
                return _train_in(directory, order, resumed, console, location=location, wall=wall)
            conclude(out, console, location=location)
            return _failures(order, directory)
    # Before minutes of loading: a directory that cannot be made stops the run.
    RunDirectory.check_writable(out)
    run = _prepare(order, console, wall=wall)
    with RunDirectory.open(out, resume=False) as directory:
        return _train_in(directory, order, run, console, location=location, wall=wall)


def _train_in(
    directory: RunDirectory,
    order: Order,
    run: PreparedRun,
    console: Console,
    *,
    location: Path | RunUrl,
    wall: WallClock,
) -> int:
    """Trains a prepared run and reports its results; returns the exit code."""
    from weft.cli.watch import conclude, follow, print_time, record_time
    from weft.report.page import ReportExtra

    facts: tuple[tuple[str, str], ...] = ()
    states, stopped = follow(run, directory, console, location)
    directory.check_owned()
    code = _failures(order, directory)
    run.engine.close()
    paused = [job for job in run.engine.jobs.values() if job.state == "paused"]
    try:
        with wall.spending(Activity.WRITING):
            time, facts = partial(record_time, wall, directory), _compared(order, directory, wall)
            extra = ReportExtra("The plan and the run", facts=facts) if facts else None
            conclude(directory.path, console, extra, live=run.engine.jobs, location=location, time=time)
    except StorageError as error:
        # A disk without room for a job's files has no room for a report either.
        if not paused:
            raise
        print_line(console, f"no report: {error}", "yellow")
    record_time(wall, directory)
    print_time(wall, console)
    if facts:
        print_line(console, "plan      " + ", ".join(f"{label} {value}" for label, value in facts))
    if stopped and {"paused", "queued"} & set(states.values()):
        again = order.invocation.resume_command(location, *(["--keep-going"] if order.keep_going else []))
        print_line(console, f"stopped; go on with: {again}")
        return 130
    if paused:
        raise StorageError(f"{paused[0].reason} Free some space and go on with --resume.", where=paused[0].spec.name)
    return code


def _compared(order: Order, directory: RunDirectory, wall: WallClock) -> tuple[tuple[str, str], ...]:
    if order.pace is None:
        return ()
    trained = ((directory.read_status(job.name) or {}).get("trained_tokens", 0) for job in order.spec.jobs)
    return order.pace.compared(wall.of_run().seconds(Activity.COMPUTING), sum(trained))


def _failures(order: Order, directory: RunDirectory) -> int:
    states = [(directory.read_status(job.name) or {}).get("state") for job in order.spec.jobs]
    return 1 if "failed" in states else 0


def _prepare(
    order: Order,
    console: Console,
    finished: frozenset[str] = frozenset(),
    clock: datetime.datetime | None = None,
    wall: WallClock | None = None,
) -> PreparedRun:
    """Loads the run, without its finished jobs; `clock` is when it began, if it is resumed."""
    from weft.cli.watch import loading
    from weft.engine.execute.data_ahead import prepare_ahead
    from weft.report.trackers import open_trackers

    spec, clock = order.spec, clock or datetime.datetime.now()
    # Opening them touches nothing; a tracker that is not installed is reported before the model is loaded.
    open_trackers(spec.report_to, Path(), "")
    hosts = order.hosts
    with loading(console), ExitStack() as undo, ExitStack() as end:
        # Others work while this process imports what it needs itself.
        jobs = [job for job in spec.jobs if job.name not in finished]
        ahead = prepare_ahead(spec.base_model, jobs, order.jobs_file.parent, clock)
        if ahead is not None:
            end.callback(ahead.close)
        ranks = None
        if hosts is not None:
            print_join_command(hosts, console)
            from weft.parallel.replicas.hosts import rank_order

            ranks = hosts.start(rank_order(spec, spec.jobs))
            undo.callback(ranks.abandon)
        from weft.engine.train import prepare_run

        run = prepare_run(
            spec,
            base_dir=order.jobs_file.parent,
            keep_going=order.keep_going,
            skip=finished,
            clock=clock,
            locate=order.locate,
            wall=wall,
            open_engine=_opener(ranks, order, clock),
            ahead=ahead,
        )
        undo.pop_all()
    facts = run.engine.executor.facts
    stored = facts.storage if spec.quantize != "none" else facts.dtype
    lines = [
        f"backbone  {spec.base_model} on {facts.device}, {stored}",
        *([] if hosts is None else [f"replicas  {hosts.number}, {hosts.manner}"]),
        f"kernels   {facts.kernels}",
        f"capacity  {run.spec.capacity:,} tokens a microbatch",
        *(f"note      {note}" for note in run.notes),
        *(f"data      {name}: {data.train.summary.describe()}" for name, data in run.data.items()),
    ]
    print_line(console, "\n".join(lines))
    return run


def _opener(ranks: RankGroup | None, order: Order, clock: datetime.datetime) -> OpenEngine:
    from weft.engine.train import load_engine

    model = order.model
    if ranks is not None:
        from weft.parallel.replicas.following_engine import FollowingEngine
        from weft.parallel.replicas.replicated_engine import ReplicatedEngine

        notes = () if model is None else order.layout.notes(order.spec, model)
        load = ReplicatedEngine.load
        if model is not None and order.forecast is not None:
            load = partial(
                FollowingEngine.load, layouts=order.layout.keeper(order.spec, model, order.forecast, order.spec.jobs)
            )
        return lambda spec, jobs, wall: load(spec, ranks, clock=clock, wall=wall, notes=notes)
    stages = order.layout.stages
    if model is None or stages is None:
        return load_engine
    from weft.parallel.stages.load_stages import load_staged

    return lambda spec, jobs, wall: load_staged(spec, model, jobs, stages, wall, order.stage_hosts)


def _show_plan(
    run: PreparedRun, forecast: Sequence[str], notes: Sequence[str], layout: LayoutOption | None, console: Console
) -> None:
    """Prints the plan. `layout`: the prediction for one over several devices, `forecast`: its text."""
    import torch

    from weft.engine.engine import Engine
    from weft.engine.preview import preview
    from weft.report.readable import NameCell, expert_costs, plain_table

    assert isinstance(run.engine, Engine), "one replica shows what all would do"
    if layout is not None:
        # Its devices are cores, and so is what it is compared with.
        torch.set_num_threads(1)
    with console.status("trying one microbatch"):
        plan = preview(run.engine)
    table = plain_table("job", "steps", "tokens", "parameters", left=("job",))
    for job in plan.jobs:
        table.add_row(NameCell(job.name), f"{job.num_steps:,}", f"{job.num_tokens:,}", f"{job.num_parameters:,}")
    console.print(table)
    trained = [job for job in plan.jobs if job.experts]
    costs = expert_costs((job.name, job.experts, job.num_parameters, job.num_bytes, job.num_alike) for job in trained)
    for line in costs:
        print_line(console, line)
    if plan.capacity != run.spec.capacity:
        print_note(console, f"there is memory for microbatches of {plan.capacity:,} tokens only")
    for line in forecast:
        print_line(console, f"layout    {line}")
    for note in notes:
        print_note(console, note)
    console.print("\n".join(_figures(plan, layout)), highlight=False, soft_wrap=True)
    for name, error in run.failed.items():
        print_line(console, f"{name}: would fail: {error}", "red")


def _figures(plan: Preview, layout: LayoutOption | None) -> list[str]:
    """Memory and time of one device, as measured, and those predicted for a layout."""
    mib, on_one = 2**20, ""
    memory = (
        f"about {plan.total_bytes / mib:,.0f} MiB: backbone {plan.backbone_bytes / mib:,.0f}, adapters with "
        f"optimizer {plan.adapter_bytes / mib:,.0f}, activations {plan.activation_bytes / mib:,.0f} "
        f"({'measured' if plan.is_memory_measured else 'estimated'})"
    )
    seconds = f"about {plan.seconds:,.0f} s of training (one microbatch measured here)"
    if layout is not None:
        on_one, each = " on one device", size(layout.device_bytes)
        memory += f" on one device; with full microbatches up to {each} a device of {layout.layout} (predicted)"
        seconds = (
            f"about {plan.seconds / layout.speed:,.0f} s of training in {layout.layout}, which is predicted to be "
            f"{layout.speed:.2f}x as fast as one device: {seconds}"
        )
    return [
        f"plan      {counted(plan.num_microbatches, 'microbatch')} of up to {plan.capacity:,} tokens{on_one}, "
        f"on average {plan.fill:.0%} of that",
        f"memory    {memory}",
        f"time      {seconds}",
        "dry run: nothing was written",
    ]
