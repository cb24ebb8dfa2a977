"""`weft train` trains all jobs of a file together on one backbone."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from weft import processes
from weft.cli.layout_options import Layout, LayoutOptions, PipelineSchedule
from weft.cli.replica_options import Cluster, Devices, GpuType, Listen, ReplicaOptions, Replicas, print_join_command
from weft.cli.restart import retry_on_replica_loss
from weft.cli.user_path import looked_at, run_location, trained_in, user_path
from weft.errors import ConfigError, StorageError, WeftError
from weft.report.readable import output_console
from weft.spec import JobSpec, RunSpec, load_run
from weft.spec.load import locate
from weft.wall_clock import Activity, WallClock, process_start_s
from weft.wording import counted, size

if TYPE_CHECKING:
    from weft.engine.preview import Preview
    from weft.engine.train import OpenEngine, PreparedRun
    from weft.model.resolve import ResolvedModel
    from weft.parallel.auto_layout import Machine
    from weft.parallel.replicas.layout_keeper import LayoutKeeper
    from weft.parallel.replicas.places import ReplicaHosts
    from weft.parallel.replicas.rank_group import RankGroup
    from weft.plan.choose_layout import LayoutOption
    from weft.plan.replan import Forecaster, Prediction
    from weft.plan.replan.devices import DeviceForecaster
    from weft.store.remote.run_url import RunUrl
    from weft.store.run_dir import RunDirectory


def train(
    jobs_file: Annotated[
        Path,
        typer.Argument(parser=user_path, metavar="PATH", help="The jobs file; `weft init` writes one to start from."),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change: jobs.0.adapter.r=32")] = None,
    out: Annotated[
        Any,
        typer.Option(
            parser=run_location, metavar="PATH", help="Where results go, or a URL such as s3://…. Default: output_dir."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output directory.")] = False,
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
    planner: Annotated[str | None, typer.Option(help="auto, greedy or exact; short for planner=…")] = None,
    replicas: Replicas = None,
    devices: Devices = None,
    cluster: Cluster = None,
    gpu_type: GpuType = None,
    listen: Listen = None,
    layout: Layout = None,
    schedule: PipelineSchedule = None,
) -> None:
    """Train all jobs of a file together on one backbone."""
    short = {"memory_limit": memory_limit, "kernels": kernels, "planner": planner}
    changes = (*(overrides or ()), *(f"{name}={value}" for name, value in short.items() if value is not None))
    spec = load_run(jobs_file, changes)
    place = out or run_location(spec.output_dir)
    options = ReplicaOptions(replicas, devices if layout is None else None, cluster, gpu_type, listen)
    stages = LayoutOptions(layout, schedule, None if layout is None else devices)
    reasons: tuple[str, ...] = ()
    predicted: LayoutOption | None = None
    forecast: Forecaster | None = None
    model: ResolvedModel | None = None
    said = Invocation(("weft", "train", str(jobs_file), *changes), (*options.flags, *stages.flags))
    if stages.is_auto:
        from weft.model.resolve import resolve
        from weft.parallel.auto_layout import machine_here

        stages.check_alone(options.flags)
        model, machine = resolve(spec.backbone), machine_here(spec)
        forecast = _forecaster(spec, stages, model, machine)
        stages, (_, reasons, predicted) = stages.choose(spec, model, jobs_file.parent, machine)
    elif not stages.chosen.is_one_device:
        if not dry_run:
            # Beside what this process imports itself, from the next line on.
            processes.prepare()
        from weft.model.resolve import resolve

        model = resolve(spec.backbone)
    try:
        stages.check(spec, options.flags, model)
    except ConfigError as error:
        if error.where is None or not error.where.startswith("jobs."):
            raise
        raise error.at(locate(error.where, jobs_file, changes)) from None
    order = Order(spec, jobs_file, changes, keep_going, options, stages, said, model, forecast)
    console = output_console()
    for reason in reasons:
        console.print(f"layout    {reason}", markup=False, highlight=False, soft_wrap=True)
    if dry_run:
        from weft.store.run_dir import RunDirectory

        with looked_at(place) as directory:
            is_taken = RunDirectory.holds_run(directory)
            if resume or not is_taken:
                RunDirectory.check(directory, resume=resume)
        if is_taken and not resume:
            _note(console, f"{place} holds a run: train with --resume, or into another --out")
        options.check(spec.backbone)
        alone = replace(order, replicas=ReplicaOptions(), layout=LayoutOptions(), model=None, forecast=None)
        run = _prepare(alone, console)
        told: tuple[str, ...] = ()
        if not reasons and stages.layout is not None:
            from weft.model.resolve import resolve
            from weft.parallel.auto_layout import machine_here, predicted_on

            model = model or resolve(spec.backbone)
            # Of GPUs that the hardware table does not have nothing is predicted.
            with suppress(ConfigError):
                predicted, _, told = predicted_on(spec, model, stages.layout, jobs_file.parent, machine_here(spec))
        if predicted is not None and predicted.layout.is_one_device:
            predicted = None
        _show_plan(run, told, () if model is None else stages.notes(spec, model), predicted, console)
        return
    train_order(order, place, resume=resume)


def _forecaster(spec: RunSpec, asked: LayoutOptions, model: ResolvedModel, machine: Machine) -> DeviceForecaster | None:
    """Chooses the layout again when jobs come and go; None if it stays.

    Only on CPUs: it is untested whether closed replicas leave a GPU's memory free for others. A given schedule needs
    stages, which another layout might not have.
    """
    from weft.parallel.auto_layout import device_forecaster

    if not machine.is_cpu or asked.schedule is not None:
        return None
    try:
        LayoutOptions("stages:2").check(spec, (), model)
    except WeftError:
        return None
    return device_forecaster(spec, model, machine)


def train_order(order: Order, place: Path | RunUrl, *, resume: bool) -> NoReturn:
    """Trains what was ordered, to the exit of the command."""
    console = output_console()
    with trained_in(place, resume=resume, notify=lambda text: _note(console, text)) as directory:
        wall = WallClock(process_start_s())
        is_staged = order.places is None and order.layout.stages is not None
        train_all = _train_through if is_staged else _train
        code = train_all(order, directory, console, resume=resume, place=place, wall=wall)
    raise typer.Exit(code)


@dataclass(frozen=True)
class Invocation:
    """A command as it was given, but for where results go and for what a run that goes on is told."""

    words: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def again(self, place: Path | RunUrl, *flags: str) -> str:
        """The command that goes on with the run."""
        return shlex.join([*self.words, "--out", str(place), "--resume", *flags, *self.flags])


@dataclass(frozen=True)
class Order:
    """What was asked for on the command line."""

    spec: RunSpec
    jobs_file: Path
    overrides: tuple[str, ...]
    keep_going: bool
    replicas: ReplicaOptions
    layout: LayoutOptions
    said: Invocation
    model: ResolvedModel | None = None
    """None: it is resolved where it is loaded."""
    forecast: Forecaster | None = None
    """What the layout is chosen anew by when jobs come and go; None: it stays."""

    @cached_property
    def places(self) -> ReplicaHosts | None:
        """Where its replicas are, if each has an engine of its own."""
        if self.forecast is not None:
            assert self.model is not None, "a layout that follows the jobs was planned for a model"
            return self.layout.in_ranks(self.model, self.spec.jobs)
        return self.replicas.places(self.spec.backbone) or self.layout.places(self.model, self.spec.jobs)

    def locate(self, setting: str) -> str:
        """Where a setting was written, for mistakes that show only later."""
        return locate(setting, self.jobs_file, self.overrides)


def _note(console: Console, text: str) -> None:
    console.print(f"note      {text}", markup=False, highlight=False, soft_wrap=True)


def _train_through(
    order: Order, out: Path, console: Console, *, resume: bool, place: Path | RunUrl, wall: WallClock
) -> int:
    """The same where a stage may be lost: all stages are started again then, and jobs go on from their checkpoints."""
    from weft.store.run_dir import RunDirectory

    clocks = [wall]

    def attempt(is_later: bool) -> int:
        if is_later:
            clocks.append(clocks[-1].again())
        resumes = RunDirectory.holds_run(out) if is_later else resume
        return _train(order, out, console, resume=resumes, place=place, wall=clocks[-1])

    return retry_on_replica_loss(attempt, lambda text: _note(console, text))


def _train(order: Order, out: Path, console: Console, *, resume: bool, place: Path | RunUrl, wall: WallClock) -> int:
    """Runs or resumes in a directory, which its owner knows as `place`; returns the exit code."""
    from weft.cli.watch import conclude
    from weft.store.run_dir import RunDirectory

    RunDirectory.check(out, resume=resume)
    if resume:
        from weft.engine.resume import check_same_data, plan_resume, with_recorded_capacity
        from weft.engine.train import clock_of

        with RunDirectory.open(out, resume=True) as directory:
            plan = plan_resume(order.spec, directory, locate=order.locate)
            if len(plan.done) == len(order.spec.jobs):
                console.print("nothing to resume: every job has ended")
                conclude(out, console, place=place)
                return _failures(order, directory)
            order = replace(order, spec=with_recorded_capacity(order.spec, directory))
            if plan.changes:
                changes = "; ".join(plan.changes)
                console.print(f"takes over  {changes}", markup=False, highlight=False, soft_wrap=True)
            run = _prepare(order, console, plan.done, clock_of(directory.read_run()), wall)
            check_same_data(run, directory)
            return _train_in(directory, order, run, console, place=place, wall=wall)
    run = _prepare(order, console, wall=wall)
    with RunDirectory.open(out, resume=False) as directory:
        return _train_in(directory, order, run, console, place=place, wall=wall)


def _train_in(
    directory: RunDirectory, order: Order, run: PreparedRun, console: Console, *, place: Path | RunUrl, wall: WallClock
) -> int:
    """Trains what is prepared and concludes it; returns the exit code."""
    from weft.cli.watch import conclude, follow, print_time, settle

    states, stopped = follow(run, directory, console, place)
    directory.check_owned()
    code = _failures(order, directory)
    run.engine.close()
    paused = [job for job in run.engine.jobs.values() if job.state == "paused"]
    try:
        with wall.spending(Activity.WRITING):
            time = partial(settle, wall, directory)
            conclude(directory.path, console, live=run.engine.jobs, place=place, time=time)
    except StorageError as error:
        # A disk that has no room for a job's files has none for a report about it.
        if not paused:
            raise
        console.print(f"no report: {error}", style="yellow", markup=False, soft_wrap=True)
    settle(wall, directory)
    print_time(wall, console)
    if stopped and {"paused", "queued"} & set(states.values()):
        again = order.said.again(place, *(["--keep-going"] if order.keep_going else []))
        console.print(f"stopped; go on with: {again}", markup=False, soft_wrap=True)
        return 130
    if paused:
        raise StorageError(f"{paused[0].reason} Free some space and go on with --resume.", where=paused[0].spec.name)
    return code


def _failures(order: Order, directory: RunDirectory) -> int:
    """The exit code of a run in which nothing else went wrong: 1 if a job failed, now or before a resume."""
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
    from weft.cli.loading import loading
    from weft.engine.execute.data_ahead import prepare_ahead
    from weft.report.trackers import open_trackers

    spec, clock = order.spec, clock or datetime.datetime.now()
    # Opening them touches nothing, and nobody should wait for the model to hear that one is not installed.
    open_trackers(spec.report_to, Path(), "")
    places = order.places
    with loading(console), ExitStack() as undo, ExitStack() as end:
        # Others work while this process imports what it needs itself.
        jobs = [job for job in spec.jobs if job.name not in finished]
        ahead = prepare_ahead(spec.base_model, jobs, order.jobs_file.parent, clock)
        if ahead is not None:
            end.callback(ahead.close)
        ranks = None
        if places is not None:
            print_join_command(places, console)
            from weft.parallel.replicas.places import rank_order

            ranks = places.start(rank_order(spec, spec.jobs))
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
        *([] if places is None else [f"replicas  {places.number}, {places.manner}"]),
        f"kernels   {facts.kernels}",
        f"capacity  {run.spec.capacity:,} tokens a microbatch",
        *(f"note      {note}" for note in run.notes),
        *(f"data      {name}: {data.train.summary.describe()}" for name, data in run.data.items()),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return run


def _opener(ranks: RankGroup | None, order: Order, clock: datetime.datetime) -> OpenEngine:
    """What loads the engine of a run: here, over stages, or over ranks."""
    from weft.engine.train import load_engine

    model = order.model
    if ranks is not None:
        from weft.parallel.replicas.load import load_following, load_replicated

        notes = () if model is None else order.layout.notes(order.spec, model)
        if model is None or order.forecast is None:
            return lambda spec, jobs, wall: load_replicated(spec, ranks, clock=clock, wall=wall, notes=notes)
        layouts = _keeper(order, model, order.forecast)
        return lambda spec, jobs, wall: load_following(spec, ranks, layouts, clock=clock, wall=wall, notes=notes)
    stages = order.layout.stages
    if model is None or stages is None:
        return load_engine
    from weft.parallel.load_staged import load_staged

    return lambda spec, jobs, wall: load_staged(spec, model, jobs, stages, wall)


def _keeper(order: Order, model: ResolvedModel, forecast: Forecaster) -> LayoutKeeper:
    """What has the layout of a run follow its jobs."""
    from weft.parallel.replicas.layout_keeper import LayoutKeeper
    from weft.parallel.replicas.places import rank_order
    from weft.plan.replan import Prediction

    def open_ranks(wanted: Prediction, jobs: Sequence[JobSpec], capacity: int) -> RankGroup:
        options = LayoutOptions(str(wanted.layout), planned=wanted.replicas)
        options.check(order.spec, (), model)
        setup = replace(rank_order(order.spec, order.spec.jobs), capacity=capacity)
        return options.in_ranks(model, jobs).start(setup)

    first = Prediction(order.layout.chosen, 0.0, 0.0, order.layout.planned)
    return LayoutKeeper(first, forecast, open_ranks, planned_for=[job.name for job in order.spec.jobs])


def _show_plan(
    run: PreparedRun, told: Sequence[str], notes: Sequence[str], layout: LayoutOption | None, console: Console
) -> None:
    """Prints what would be done; `layout`: what is predicted of one over several devices, as `told` says, and `notes`:
    more on it."""
    import torch

    from weft.engine.engine import Engine
    from weft.engine.preview import preview
    from weft.report.readable import NameCell

    assert isinstance(run.engine, Engine), "one replica shows what all would do"
    if layout is not None:
        # Its devices are cores, and so is what it is compared with.
        torch.set_num_threads(1)
    with console.status("trying one microbatch"):
        plan = preview(run.engine)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("job", "steps", "tokens", "parameters"):
        table.add_column(name, justify="left" if name == "job" else "right", no_wrap=name != "job")
    for job in plan.jobs:
        table.add_row(NameCell(job.name), f"{job.num_steps:,}", f"{job.num_tokens:,}", f"{job.num_parameters:,}")
    console.print(table)
    if plan.capacity != run.spec.capacity:
        _note(console, f"there is memory for microbatches of {plan.capacity:,} tokens only")
    for line in told:
        console.print(f"layout    {line}", highlight=False, markup=False, soft_wrap=True)
    for note in notes:
        _note(console, note)
    console.print("\n".join(_figures(plan, layout)), highlight=False, soft_wrap=True)
    for name, error in run.failed.items():
        console.print(f"{name}: would fail: {error}", style="red", markup=False, soft_wrap=True)


def _figures(plan: Preview, layout: LayoutOption | None) -> list[str]:
    """Of one device, measured; and what a layout is predicted to make of that."""
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
