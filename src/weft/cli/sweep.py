"""`weft sweep` trains many configurations together on one backbone and keeps the best.

weft sweep sweep.yaml                        what the file says
weft sweep sweep.yaml --trials 32            at most 32 configurations
weft sweep sweep.yaml --dry-run              check everything, and plan it: packs, time, memory
weft sweep sweep.yaml --dry-run --device a100-40 --gpus 8      the plan for GPUs that are not here
weft sweep sweep.yaml job.max_steps=200      another setting for all of them
weft sweep jobs.yaml --space space.yaml      a jobs file with one job, and Axolotl's kind of sweep file
weft sweep sweep.yaml --replicas 2           two copies of the backbone, trials placed over them
weft sweep sweep.yaml --layout stages:2      one backbone whose layers are divided over two processes
weft sweep sweep.yaml --layout auto          whatever is predicted fastest for the first trials
weft sweep sweep.yaml --resume               go on after a stop or a crash
"""

from __future__ import annotations

import contextlib
import datetime
import shlex
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from weft.cli.layout_options import Layout, LayoutOptions, PipelineSchedule
from weft.cli.replica_options import Cluster, Devices, GpuType, Listen, ReplicaOptions, Replicas, print_join_command
from weft.cli.restart import retry_on_replica_loss
from weft.cli.user_path import looked_at, run_location, trained_in, user_path
from weft.errors import ConfigError, WeftError
from weft.report.readable import output_console
from weft.spec import RunSpec
from weft.spec.load import parse, place_of
from weft.spec.load_sweep import check_trials, in_its_words, load_sweep, probe_jobs, space_of
from weft.spec.sweep import SweepSpec
from weft.wall_clock import WallClock, process_start_s
from weft.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.model.resolve import ResolvedModel
    from weft.parallel.replicas.places import ReplicaHosts
    from weft.spec import JobSpec
    from weft.store.remote.run_url import RunUrl
    from weft.sweeps.api import OpenSweepEngine, PreparedSweep, SweepResult
    from weft.sweeps.sweep_engine import SweepEngine
    from weft.sweeps.trial_loop import SweepRun

SHOWN = 40
"""Trials of the table at the end; all of them are in leaderboard.csv."""


def sweep(
    sweep_file: Annotated[
        Path,
        typer.Argument(
            parser=user_path, metavar="PATH", help="The sweep file; a jobs file with one job will do with --space."
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change: job.max_steps=200")] = None,
    space: Annotated[str | None, typer.Option(help="A file with the search space, such as Axolotl's.")] = None,
    out: Annotated[
        Any,
        typer.Option(
            parser=run_location, metavar="PATH", help="Where results go, or a URL such as s3://…. Default: output_dir."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in the output directory.")] = False,
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
        str | None, typer.Option(help="With --dry-run: plan for h200, h100, a100-80, … Default: what is here.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="With --dry-run: plan for so many of them.", min=1)] = None,
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
    said = (*options.flags, *layouts.flags)
    if not dry_run and (device is not None or gpus is not None):
        flag = "--gpus" if device is None else "--device"
        raise ConfigError("is what --dry-run plans for; a sweep trains on the device that is here.", where=flag)
    if layout is not None and (device is not None or gpus is not None):
        raise ConfigError("is for the devices that are here; leave it out of a plan for others.", where="--layout")
    if device is not None:
        _check_device(device)
    model: ResolvedModel | None = None
    try:
        if layout is not None:
            from weft.model.resolve import resolve

            layouts.check_alone(options.flags)
            model = resolve(spec.backbone)
            if layouts.is_auto:
                layouts = _chosen_layout(spec, model, layouts, sweep_file.parent, output_console())
        _check_layout(spec, model, layouts, options.flags)
        if device is not None or gpus is not None:
            _plan_elsewhere(spec, sweep_file, output_console(), device, gpus or 1)
            return
        if dry_run:
            options.check(spec.backbone)
        places = None if dry_run else _places(spec, options, layouts, model)
        place = _place(out or run_location(spec.output_dir))
        order = Order(
            spec, sweep_file, place, resume=resume, dry_run=dry_run, places=places, layout=layouts, model=model
        )
        raise typer.Exit(_sweep(order, output_console()))
    except ConfigError as error:
        raise _placed(error, sweep_file, changes) from None
    except _StoppedError:
        again = ["weft", "sweep", str(sweep_file), *changes, *(["--space", space] if space else [])]
        again += [*said, "--out", str(place), "--resume"]
        output_console().print(f"stopped; go on with: {shlex.join(again)}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None


class _StoppedError(Exception):
    """The user asked the sweep to stop; everything is saved."""


def _place(place: Path | RunUrl) -> Path | RunUrl:
    """Where a sweep is, known by its own marks if that is behind a URL."""
    if isinstance(place, Path):
        return place
    from weft.sweeps.record.leaderboard import TRIALS

    return replace(place, content="sweep", mark=f"{TRIALS}/run.json")


def _placed(error: ConfigError, path: Path, changes: tuple[str, ...]) -> WeftError:
    """An error found late, said of the line that caused it."""
    from weft.spec.load import apply_override

    tree, lines = parse(path)
    error = in_its_words(error, tree)
    given = {apply_override(tree, change, SweepSpec): change for change in changes}
    if error.where is None or any(mark in error.where for mark in (" line ", ": ", "=", "--")):
        return error
    return error.at(place_of(error.where, path, lines, given, SweepSpec))


@dataclass(frozen=True)
class Order:
    """What was asked for on the command line."""

    spec: SweepSpec
    file: Path
    out: Path | RunUrl
    """Where results go."""
    resume: bool
    dry_run: bool
    places: ReplicaHosts | None
    """Where the replicas are; None: one in this process."""
    layout: LayoutOptions
    """How one lies over devices."""
    model: ResolvedModel | None
    """None without a layout: it is resolved where it is loaded."""


def _chosen_layout(
    spec: SweepSpec, model: ResolvedModel, asked: LayoutOptions, base_dir: Path, console: Console
) -> LayoutOptions:
    """A layout in the place of auto, by the trials that begin together, and all that may come; says why it is that."""
    from weft.parallel.auto_layout import machine_here
    from weft.sweeps.search.samplers import first_trials

    shared = {field.name: getattr(spec, field.name) for field in fields(RunSpec)}
    beginning = RunSpec(**shared | {"jobs": tuple(first_trials(spec))})

    def check_more(options: LayoutOptions) -> None:
        _check_layout(spec, model, options, ())

    options, found = asked.choose(beginning, model, base_dir, machine_here(beginning), check_more)
    for line in found.lines:
        _line(console, f"layout    {line}")
    return options


def _check_layout(
    spec: SweepSpec, model: ResolvedModel | None, layout: LayoutOptions, replica_flags: Sequence[str]
) -> None:
    """Raises what keeps trials from being trained in a layout, as far as that is known before anything is read."""
    layout.check(spec, replica_flags, model)
    stages = layout.stages
    if model is not None and stages is not None:
        from weft.parallel.stages.load_stages import check_job

        check_trials(spec, lambda job: check_job(model, job, stages))


def _places(
    spec: SweepSpec, options: ReplicaOptions, layout: LayoutOptions, model: ResolvedModel | None
) -> ReplicaHosts | None:
    """Where the replicas are; None where one engine is enough. ConfigError for what cannot be."""
    needs_one = spec.early_stop.rule == "halving" and (spec.max_tokens is not None or spec.max_seconds is not None)
    places = options.places(spec.backbone)
    if places is not None and needs_one:
        found = "halving with a budget of tokens or time runs on one replica only"
        raise ConfigError(f"{found}; use asha, or no --replicas.", where="early_stop")
    if needs_one or layout.chosen.is_one_device:
        return places
    return places or layout.places(model, probe_jobs(spec))


def _opener(order: Order, clock: datetime.datetime, console: Console) -> OpenSweepEngine:
    from weft.engine.train import load_engine
    from weft.parallel.load_staged import load_staged
    from weft.parallel.replicas.load import load_steered
    from weft.parallel.replicas.places import rank_order

    places, stages, model = order.places, order.layout.stages, order.model
    if places is None and model is not None and stages is not None and not order.dry_run:
        return lambda spec, jobs, wall: load_staged(spec, model, jobs, stages, wall)
    if places is None:
        return load_engine

    def load(
        spec: SweepSpec, jobs: Sequence[JobSpec], wall: WallClock | None
    ) -> tuple[SweepSpec, SweepEngine, tuple[str, ...]]:
        print_join_command(places, console)
        ranks = places.start(rank_order(spec, jobs, is_controlled=True))
        return load_steered(spec, ranks, clock=clock, wall=wall)

    return load


def _sweep(order: Order, console: Console) -> int:
    begun_s, wall = time.perf_counter(), WallClock(process_start_s())

    def tell(text: str) -> None:
        _line(console, f"note      {text}")

    place, resume = order.out, order.resume
    with looked_at(place) if order.dry_run else trained_in(place, resume=resume, notify=tell) as folder:
        clocks = [wall]

        def attempt(is_later: bool) -> int | None:
            if not is_later:
                return _sweep_in(folder, order, console, begun_s, wall)
            clocks.append(clocks[-1].again())
            return _sweep_again(folder, order, console, clocks[-1])

        is_staged = order.places is None and order.layout.stages is not None
        code = retry_on_replica_loss(attempt, tell) if is_staged else attempt(False)
    if code is None:
        raise _StoppedError
    return code


def _sweep_again(folder: Path, order: Order, console: Console, wall: WallClock) -> int | None:
    """The same once a stage was lost: trials go on from their checkpoints as soon as there are any."""
    from weft.store.run_dir import RunDirectory
    from weft.sweeps.record.leaderboard import TRIALS

    order = replace(order, resume=RunDirectory.holds_run(folder / TRIALS))
    return _sweep_in(folder, order, console, time.perf_counter(), wall)


def _sweep_in(folder: Path, order: Order, console: Console, begun_s: float, wall: WallClock) -> int | None:
    """Trains a sweep in a folder, or only shows it; returns the exit code, or None if the user stopped it."""
    from weft.cli.loading import loading
    from weft.engine.execute.data_ahead import prepare_ahead
    from weft.sweeps.api import begun_at, check_folder, prepare_sweep

    resume = order.resume
    spec = check_folder(order.spec, folder, resume=resume)
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
    """Trains what is prepared, or only shows it; returns the exit code, or None if the user stopped it."""
    from weft.cli.watch import StopRequest, stop_signals
    from weft.sweeps.api import conclude, open_run
    from weft.sweeps.live_board import LiveBoard

    _introduce(prepared, order.places, console)
    if order.dry_run:
        for note in order.layout.notes(order.spec, order.model) if order.model is not None else ():
            _line(console, f"note      {note}")
        if order.layout.stages is not None:
            _line(console, f"note      the plan is of one device; {order.layout.layout} is checked and not planned")
        _show_plan(prepared, console)
        console.print("dry run: nothing was written")
        return 0
    stop = StopRequest(console)
    board = LiveBoard(console)
    with open_run(prepared, folder, resume=order.resume, on_news=board.hear) as run:
        with board.watch(run), stop_signals(stop):
            run.train(should_stop=lambda: stop.is_set)
        if stop.is_set and not all(trial.state.is_final for trial in run.trials):
            return None
        with console.status("measuring one trial alone and writing the report"):
            result = conclude(run)
        _tell(run, result, order.out, console)
    return 0 if result.best is not None else 1


def _check_device(device: str) -> None:
    from weft.plan.cost.hardware import find_hardware

    try:
        find_hardware(device)
    except ConfigError as error:
        raise ConfigError(error.message, where="--device", hint=error.hint) from None


def _plan_elsewhere(spec: SweepSpec, file: Path, console: Console, device: str | None, gpus: int) -> None:
    """Plans for hardware that is not here, without the model's weights."""
    from weft.cli.loading import loading
    from weft.sweeps.cost_preview import device_here, plan_elsewhere

    with loading(console, "reading the data and planning"):
        plan = plan_elsewhere(spec, file.parent, device or device_here(), gpus)
    _line(console, str(plan))
    console.print("dry run: nothing was written")


def _show_plan(prepared: PreparedSweep, console: Console) -> None:
    """The plan for the device that is here, or why there is none; the sweep does not depend on it."""
    from weft.sweeps.cost_preview import device_here, plan_configurations

    here = "cpu" if prepared.engine.executor.facts.device_kind == "cpu" else device_here()
    try:
        plan = plan_configurations(prepared.spec, prepared.configurations, here)
    except WeftError as error:
        _line(console, f"plan      none: {error}")
        return
    console.print()
    _line(console, str(plan))


def _introduce(prepared: PreparedSweep, places: ReplicaHosts | None, console: Console) -> None:
    spec, facts = prepared.spec, prepared.engine.executor.facts
    points = space_of(spec).num_distinct
    count = "endlessly many points" if points is None else counted(points, "point")
    budgets = [(spec.trials, "trials"), (spec.max_tokens, "tokens"), (spec.max_seconds, "s")]
    limits = ", ".join(f"{amount:,} {unit}" for amount, unit in budgets if amount is not None)
    objective = spec.objective
    lines = [
        f"backbone  {spec.base_model} on {facts.device}, {facts.dtype}",
        *([] if places is None else [f"replicas  {places.number}, {places.manner}"]),
        f"kernels   {facts.kernels}",
        f"capacity  {spec.capacity:,} tokens a microbatch",
        *(f"note      {note}" for note in prepared.notes),
        f"space     {', '.join(p.name for p in prepared.space.parameters)}: {count}",
        f"sampler   {prepared.sampler_name}{f', at most {limits}' if limits else ''}",
        f"objective {objective.name} ({objective.mode}), early stopping: {_stopping(prepared)}",
    ]
    for data in prepared.configurations.loaded()[:4]:
        lines.append(f"data      {data.train.summary.describe()}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _stopping(prepared: PreparedSweep) -> str:
    """The rule of early stopping, or why it can stop nobody."""
    from weft.sweeps.search.samplers import num_planned

    rule, planned = prepared.spec.early_stop, num_planned(prepared.spec, prepared.space)
    if rule.rule == "none" or rule.can_stop_any(planned):
        return rule.rule
    trials = f"{counted(planned or 0, 'trial')} {'is' if planned == 1 else 'are'}"
    return f"none, {trials} too few for {rule.rule} (min_trials {rule.num_kept})"


def _tell(run: SweepRun, result: SweepResult, place: Path | RunUrl, console: Console) -> None:
    from weft.report import readable
    from weft.report.sweep.live import leaderboard_table
    from weft.sweeps.live_board import params_text

    metric, trials, best = run.context.objective.metric, run.trials, result.best
    console.print(leaderboard_table(run.ledger.board(with_curves=False), limit=SHOWN))
    console.print()
    if best is not None:
        _line(console, f"best      {best.name}: {metric} {readable.loss(best.value)} with {params_text(best)}")
        _line(console, f"          {place}/best (PEFT adapter and jobs.yaml)")
    else:
        _line(console, "best      none: no trial has a value")
    ledger = run.ledger
    spent = f"{readable.count(ledger.tokens)} tokens in {readable.duration(ledger.seconds)}"
    told = [f"{counted(len(trials), 'trial')}, {spent}"]
    left_out = 1 - sum(t.steps for t in trials) / max(sum(t.total_steps for t in trials), 1)
    if left_out > 0.005 and best is not None:
        told.append(f"{left_out:.0%} of the steps did not have to be trained")
    if ledger.one_by_one_seconds is not None and best is not None:
        factor = ledger.one_by_one_seconds / ledger.seconds
        told.append(f"one by one would take {readable.duration(ledger.one_by_one_seconds)}: {factor:.1f}x")
    _line(console, f"total     {'; '.join(told)}")
    if result.no_report:
        console.print(f"no report: {result.no_report}", style="yellow", markup=False, soft_wrap=True)
    else:
        _line(console, f"report    {place}/report.html")
    _line(console, f"time      {readable.time_split(run.context.engine.timeline.wall.since_command())}")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
