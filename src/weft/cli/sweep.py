"""`weft sweep` trains many configurations together on one backbone and keeps the best.

weft sweep sweep.yaml                        train as the file states
weft sweep sweep.yaml --trials 32            at most 32 configurations
weft sweep sweep.yaml --dry-run              check everything, and plan it: packs, time, memory
weft sweep sweep.yaml --dry-run --device a100-40 --gpus 8      the plan for GPUs that are not here
weft sweep sweep.yaml job.max_steps=200      another setting for all of them
weft sweep jobs.yaml --space space.yaml      a jobs file with one job, and Axolotl's kind of sweep file
weft sweep sweep.yaml --replicas 2           two copies of the backbone, each with trials of its own
weft sweep sweep.yaml --layout stages:2      one backbone whose layers are divided over two processes
weft sweep sweep.yaml --layout auto          whatever is predicted fastest for the trials that train
weft sweep sweep.yaml --resume               go on after a stop or a crash
"""

from __future__ import annotations

import contextlib
import datetime
import shlex
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from weft.cli.layout_options import LayoutOptions
from weft.cli.options import (
    Cluster,
    Devices,
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
from weft.errors import ConfigError, WeftError, counted
from weft.report.readable import output_console, print_line
from weft.spec import RunSpec
from weft.spec.load import location_of, parse
from weft.spec.load_sweep import check_trials, in_its_words, load_sweep, probe_jobs, space_of
from weft.spec.sweep import SweepSpec
from weft.store.wall_clock import WallClock, process_start_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weft.model.resolve import ResolvedModel
    from weft.parallel.replicas.hosts import ReplicaHosts
    from weft.plan.replan import Forecaster
    from weft.spec import JobSpec
    from weft.store.mirror import RunUrl
    from weft.sweeps.api import OpenSweepEngine, SweepResult
    from weft.sweeps.configure import SweepEngine
    from weft.sweeps.ledger import PreparedSweep
    from weft.sweeps.trial_loop import SweepRun

SHOWN = 40
"""Trials of the table at the end; all of them are in leaderboard.csv."""


def sweep(
    sweep_file: Annotated[Path, path_argument("The sweep file; a jobs file with one job will do with --space.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change: job.max_steps=200")] = None,
    space: Annotated[str | None, typer.Option(help="A file with the search space, such as Axolotl's.")] = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in the output directory.")] = False,
    trials: Annotated[int | None, typer.Option(help="Most configurations to try; short for trials=…")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to train on; short for max_tokens=…")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Longest time to train; short for max_seconds=…")] = None,
    sampler: Annotated[
        str | None, typer.Option(help="grid, random, tpe, gp, qmc or nsgaii; short for sampler=…")
    ] = None,
    every_point: Annotated[bool, typer.Option("--all", help="Train a grid of any size without a budget.")] = False,
    no_early_stop: Annotated[
        bool, typer.Option("--no-early-stop", help="Train every configuration to its end.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the plan; train and write nothing.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --dry-run: plan for h200, h100, a100-80, … Default: this machine's.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="With --dry-run: plan for this many devices.", min=1, max=1024)
    ] = None,
    replicas: Replicas = None,
    devices: Devices = None,
    cluster: Cluster = None,
    gpu_type: GpuType = None,
    listen: Listen = None,
    layout: Layout = None,
    schedule: PipelineSchedule = None,
) -> None:
    """Try many configurations together on one backbone and keep the best."""
    short = {"trials": trials, "max_tokens": max_tokens, "max_seconds": max_seconds, "sampler": sampler}
    short |= {"all_points": "true" if every_point else None, "early_stop": "none" if no_early_stop else None}
    changes = (*(overrides or ()), *(f"{name}={value}" for name, value in short.items() if value is not None))
    spec = load_sweep(sweep_file, changes, space=space)
    options = ReplicaOptions(replicas, devices if layout is None else None, cluster, gpu_type, listen)
    layouts = LayoutOptions(layout, schedule, None if layout is None else devices)
    flags = layouts.flags
    if not dry_run and (device is not None or gpus is not None):
        flag = "--gpus" if device is None else "--device"
        raise ConfigError(
            "is for a plan; add --dry-run, because a sweep trains on the devices of this machine.", where=flag
        )
    if layout is not None and (device is not None or gpus is not None):
        raise ConfigError("is for the devices that are here; leave it out of a plan for others.", where="--layout")
    if device is not None:
        _check_device(device)
    model: ResolvedModel | None = None
    forecast: Forecaster | None = None
    homes: Mapping[str, int] = {}
    try:
        if layout is not None:
            from weft.model.resolve import resolve

            layouts.check_alone(options.flags)
            model = resolve(spec.backbone)
            if layouts.is_auto:
                layouts, forecast, homes = _chosen_layout(spec, model, layouts, sweep_file.parent, output_console())
        _check_layout(spec, model, layouts, options.flags)
        if device is not None or gpus is not None:
            _plan_elsewhere(spec, sweep_file, output_console(), device, gpus or 1)
            return
        if dry_run:
            options.check(spec.backbone)
        hosts = None if dry_run else _hosts(spec, options, layouts, model, is_followed=forecast is not None)
        location = _sweep_location(out or run_location(spec.output_dir, "output_dir"))
        order = Order(
            spec,
            sweep_file,
            location,
            resume=resume,
            dry_run=dry_run,
            hosts=hosts,
            layout=layouts,
            model=model,
            forecast=forecast,
            homes=homes,
        )
        raise typer.Exit(_sweep(order, output_console()))
    except ConfigError as error:
        raise _located(error, sweep_file, changes) from None
    except _StoppedError:
        again = ["weft", "sweep", str(sweep_file), *changes, *(["--space", space] if space else [])]
        again += [*options.flags, *flags, "--out", str(location), "--resume"]
        print_line(output_console(), f"stopped; go on with: {shlex.join(again)}")
        raise typer.Exit(130) from None


class _StoppedError(Exception):
    """The user stopped the sweep; everything is saved."""


def _sweep_location(location: Path | RunUrl) -> Path | RunUrl:
    """The location; a URL is taken for a sweep if the run directory of trials is there."""
    if isinstance(location, Path):
        return location
    from weft.sweeps.leaderboard import TRIALS

    return replace(location, content="sweep", mark=f"{TRIALS}/run.json")


def _located(error: ConfigError, path: Path, changes: tuple[str, ...]) -> WeftError:
    """The error with the line or the override that caused it."""
    from weft.spec.load import apply_override

    tree, lines = parse(path)
    error = in_its_words(error, tree)
    given = {apply_override(tree, change, SweepSpec): change for change in changes}
    if error.where is None or any(mark in error.where for mark in (" line ", ": ", "=", "--")):
        return error
    return error.at(location_of(error.where, path, lines, given, SweepSpec))


@dataclass(frozen=True)
class Order:
    spec: SweepSpec
    file: Path
    out: Path | RunUrl
    resume: bool
    dry_run: bool
    hosts: ReplicaHosts | None
    layout: LayoutOptions
    model: ResolvedModel | None
    """None without a layout: resolved where it is loaded."""
    forecast: Forecaster | None
    """Chooses the layout again as trials begin and end; None if it stays."""
    homes: Mapping[str, int]
    """The replica that each of the first trials is planned on, where one is."""


def _chosen_layout(
    spec: SweepSpec, model: ResolvedModel, auto: LayoutOptions, base_dir: Path, console: Console
) -> tuple[LayoutOptions, Forecaster | None, Mapping[str, int]]:
    """Chooses a layout by the first trials, that every later trial can be trained in too, how it is chosen again, and
    the replicas of the first trials; prints the reasons."""
    from weft.parallel.auto_layout import machine_here
    from weft.sweeps.samplers import first_trials

    shared = {field.name: getattr(spec, field.name) for field in fields(RunSpec)}
    beginning = RunSpec(**shared | {"jobs": tuple(first_trials(spec))})

    def check_more(options: LayoutOptions) -> None:
        _check_layout(spec, model, options, ())

    machine = machine_here(beginning)
    follows = not _needs_one(spec)
    options, found = auto.choose(beginning, model, base_dir, machine, check_more, in_packs=follows)
    for line in found.lines:
        print_line(console, f"layout    {line}")
    forecast = auto.forecaster(beginning, model, machine, check_more, found.packs) if follows else None
    return options, forecast, found.homes


def _needs_one(spec: SweepSpec) -> bool:
    return spec.early_stop.rule == "halving" and (spec.max_tokens is not None or spec.max_seconds is not None)


def _check_layout(
    spec: SweepSpec, model: ResolvedModel | None, layout: LayoutOptions, replica_flags: Sequence[str]
) -> None:
    """Raises an error if trials cannot be trained in the layout, as far as that is known before data is read."""
    layout.check(spec, replica_flags, model)
    stages = layout.stages
    if model is not None and stages is not None:
        from weft.parallel.stages.load_stages import check_job

        check_trials(spec, lambda job: check_job(model, job, stages))


def _hosts(
    spec: SweepSpec, options: ReplicaOptions, layout: LayoutOptions, model: ResolvedModel | None, *, is_followed: bool
) -> ReplicaHosts | None:
    """Hosts of the replicas; None if one engine is enough. ConfigError for an impossible combination."""
    hosts = options.hosts(spec.backbone)
    if model is not None and is_followed:
        return layout.in_ranks(model, probe_jobs(spec))
    if hosts is not None and _needs_one(spec):
        message = "halving with a budget of tokens or time runs on one replica only; use asha, or no --replicas."
        raise ConfigError(message, where="early_stop")
    if _needs_one(spec) or layout.chosen.is_one_device:
        return hosts
    return hosts or layout.hosts(model, probe_jobs(spec))


def _opener(order: Order, clock: datetime.datetime, console: Console) -> OpenSweepEngine:
    from weft.engine.train import load_engine
    from weft.parallel.replicas.following_engine import FollowingSweep
    from weft.parallel.replicas.hosts import rank_order
    from weft.parallel.replicas.steered_engine import SweepReplicas
    from weft.parallel.stages.load_stages import load_staged

    hosts, stages, model = order.hosts, order.layout.stages, order.model
    if hosts is None and model is not None and stages is not None and not order.dry_run:
        return lambda spec, jobs, wall: load_staged(spec, model, jobs, stages, wall)
    if hosts is None:
        return load_engine

    def load(
        spec: SweepSpec, jobs: Sequence[JobSpec], wall: WallClock | None
    ) -> tuple[SweepSpec, SweepEngine, tuple[str, ...]]:
        print_join_command(hosts, console)
        ranks = hosts.start(rank_order(spec, jobs, is_controlled=True))
        if model is None or order.forecast is None:
            return SweepReplicas.load(spec, ranks, clock=clock, wall=wall, homes=order.homes)

        def check(options: LayoutOptions) -> None:
            _check_layout(spec, model, options, ())

        layouts = order.layout.keeper(spec, model, order.forecast, jobs, check, is_controlled=True)
        return FollowingSweep.load(spec, ranks, clock=clock, wall=wall, layouts=layouts, homes=order.homes)

    return load


def _sweep(order: Order, console: Console) -> int:
    """Trains the sweep. After the loss of a stage all stages start again, from the trials' checkpoints."""
    from weft.cli.watch import retry_on_replica_loss
    from weft.store.run_dir import RunDirectory
    from weft.sweeps.leaderboard import TRIALS

    begun_s, wall = time.perf_counter(), WallClock(process_start_s())
    notify, out = partial(print_note, console), order.out
    opened = open_for_reading(out) if order.dry_run else open_for_training(out, resume=order.resume, notify=notify)
    with opened as folder:

        def attempt(is_later: bool, wall: WallClock, num_lessened: int = 0) -> int | None:
            if not is_later:
                return _sweep_in(folder, order, console, begun_s, wall)
            layout = order.layout.lessened(num_lessened)
            later = replace(order, layout=layout, resume=RunDirectory.holds_run(folder / TRIALS))
            return _sweep_in(folder, later, console, time.perf_counter(), wall)

        is_staged = order.hosts is None and order.layout.stages is not None
        code = retry_on_replica_loss(attempt, wall, notify) if is_staged else attempt(False, wall)
    if code is None:
        raise _StoppedError
    return code


def _sweep_in(folder: Path, order: Order, console: Console, begun_s: float, wall: WallClock) -> int | None:
    """Trains or only shows a sweep in a folder; returns the exit code, or None if the user stopped it."""
    from weft.cli.watch import loading
    from weft.engine.execute.data_ahead import prepare_ahead
    from weft.store.run_dir import RunDirectory
    from weft.sweeps.api import begun_at, check_folder, prepare_sweep

    resume = order.resume
    spec = check_folder(order.spec, folder, resume=resume)
    RunDirectory.check_writable(folder)
    clock = (begun_at(folder) if resume else None) or datetime.datetime.now()
    base_dir = order.file.parent
    with loading(console), contextlib.ExitStack() as end:
        ahead = prepare_ahead(spec.base_model, probe_jobs(spec), base_dir, clock)
        if ahead is not None:
            end.callback(ahead.close)
        prepared = prepare_sweep(
            spec,
            base_dir,
            clock,
            begun_s=begun_s,
            wall=wall,
            open_engine=_opener(order, clock, console),
            ahead=ahead,
        )
    with contextlib.closing(prepared.engine):
        return _train(prepared, order, folder, console)


def _train(prepared: PreparedSweep, order: Order, folder: Path, console: Console) -> int | None:
    """Trains or only shows a prepared sweep; returns the exit code, or None if the user stopped it."""
    from weft.cli.watch import StopRequest, stop_signals
    from weft.sweeps.api import check_same_inputs, conclude, open_run
    from weft.sweeps.live_board import LiveBoard

    _introduce(prepared, order.hosts, console)
    if order.dry_run:
        if order.resume:
            check_same_inputs(prepared, folder)
        for note in order.layout.notes(order.spec, order.model) if order.model is not None else ():
            print_note(console, note)
        if order.layout.stages is not None:
            print_note(console, f"the plan is of one device; {order.layout.layout} is checked and not planned")
        _show_plan(prepared, console)
        console.print("dry run: nothing was written")
        return 0
    stop = StopRequest(console)
    board = LiveBoard(console)
    with open_run(prepared, folder, resume=order.resume, on_news=board.show_news) as run:
        with board.watch(run), stop_signals(stop):
            run.train(should_stop=lambda: stop.is_set)
        if stop.is_set and not all(trial.state.is_final for trial in run.trials):
            return None
        with console.status("measuring one trial alone and writing the report"):
            result = conclude(run)
        _report(run, result, order.out, console)
    return 0 if result.best is not None else 1


def _check_device(device: str) -> None:
    from weft.plan.cost.hardware import find_hardware

    try:
        find_hardware(device)
    except ConfigError as error:
        raise ConfigError(error.message, where="--device", hint=error.hint) from None


def _plan_elsewhere(spec: SweepSpec, file: Path, console: Console, device: str | None, gpus: int) -> None:
    """Plans for other hardware, without the model's weights."""
    from weft.cli.watch import loading
    from weft.sweeps.planned_packs import device_here, plan_elsewhere

    with loading(console, "reading the data and planning"):
        plan = plan_elsewhere(spec, file.parent, device or device_here(), gpus)
    print_line(console, str(plan))
    console.print("dry run: nothing was written")


def _show_plan(prepared: PreparedSweep, console: Console) -> None:
    from weft.sweeps.planned_packs import device_here, plan_configurations

    here = "cpu" if prepared.engine.executor.facts.device_kind == "cpu" else device_here()
    try:
        plan = plan_configurations(prepared.spec, prepared.configurations, here)
    except WeftError as error:
        print_line(console, f"plan      none: {error}")
        return
    console.print()
    print_line(console, str(plan))


def _introduce(prepared: PreparedSweep, hosts: ReplicaHosts | None, console: Console) -> None:
    spec, facts = prepared.spec, prepared.engine.executor.facts
    points = space_of(spec).num_distinct
    count = "endlessly many points" if points is None else counted(points, "point")
    budgets = [counted(n, noun) for n, noun in ((spec.trials, "trial"), (spec.max_tokens, "token")) if n is not None]
    budgets += [] if spec.max_seconds is None else [f"{spec.max_seconds:,} s"]
    limits = ", ".join(budgets)
    objective = spec.objective
    lines = [
        f"backbone  {spec.base_model} on {facts.device}, {facts.dtype}",
        *([] if hosts is None else [f"replicas  {hosts.number}, {hosts.manner}"]),
        f"kernels   {facts.kernels}",
        f"capacity  {spec.capacity:,} tokens a microbatch",
        *(f"note      {note}" for note in prepared.notes),
        f"space     {', '.join(p.name for p in prepared.space.parameters)}: {count}",
        f"sampler   {prepared.sampler_name}{f', at most {limits}' if limits else ''}",
        f"objective {objective.name} ({objective.mode}), early stopping: {_stopping(prepared)}",
    ]
    lines += [f"data      {data.train.summary.describe()}" for data in prepared.configurations.loaded()[:4]]
    print_line(console, "\n".join(lines))


def _stopping(prepared: PreparedSweep) -> str:
    from weft.sweeps.samplers import num_planned

    rule, planned = prepared.spec.early_stop, num_planned(prepared.spec, prepared.space)
    if rule.rule == "none" or rule.can_stop_any(planned):
        return rule.rule
    trials = f"{counted(planned or 0, 'trial')} {'is' if planned == 1 else 'are'}"
    return f"none, {trials} too few for {rule.rule} (min_trials {rule.num_kept})"


def _report(run: SweepRun, result: SweepResult, location: Path | RunUrl, console: Console) -> None:
    from weft.report import readable
    from weft.report.sweep_board import read_board
    from weft.report.sweep_page import leaderboard_table
    from weft.sweeps.live_board import params_text

    metric, trials, best = run.context.objective.metric, run.trials, result.best
    console.print(leaderboard_table(run.ledger.board(with_curves=False), limit=SHOWN))
    console.print()
    if best is not None:
        print_line(console, f"best      {best.name}: {metric} {readable.loss(best.value)} with {params_text(best)}")
        print_line(console, f"          {location}/best (PEFT adapter and jobs.yaml)")
    else:
        print_line(console, "best      none: no trial has a value")
    ledger = run.ledger
    spent = f"{readable.count(ledger.tokens)} tokens in {readable.duration(ledger.seconds)}"
    totals = [f"{counted(len(trials), 'trial')}, {spent}"]
    left_out = 1 - sum(t.steps for t in trials) / max(sum(t.total_steps for t in trials), 1)
    if left_out > 0.005 and best is not None:
        totals.append(f"{left_out:.0%} of the steps did not have to be trained")
    if ledger.one_by_one_seconds is not None and best is not None:
        factor = ledger.one_by_one_seconds / ledger.seconds
        totals.append(f"one by one would take {readable.duration(ledger.one_by_one_seconds)}: {factor:.1f}x")
    print_line(console, f"total     {'; '.join(totals)}")
    packs = read_board(run.ledger.board(with_curves=False)).packs_in_words
    if packs:
        print_line(console, f"packs     {packs}")
    if result.no_report:
        print_line(console, f"no report: {result.no_report}", "yellow")
    else:
        print_line(console, f"report    {location}/report.html")
    print_line(console, f"time      {readable.time_split(run.context.engine.timeline.wall.since_command())}")
