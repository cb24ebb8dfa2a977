"""`weft plan deploy`: which replicas a cluster should have for its jobs; nothing is trained, all is predicted."""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.layout_options import LayoutOptions
from weft.cli.options import DispatchBy, path_argument, path_option, run_location
from weft.errors import ConfigError, ModelError, counted
from weft.report.readable import output_console, print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weft.cli.train import Invocation, PlannedPace
    from weft.model.resolve import ResolvedModel
    from weft.plan.cost.analytic import BackboneSetup
    from weft.plan.deploy import ReplicaKind
    from weft.plan.deploy.kinds import GpuPool
    from weft.plan.deploy.types import DeployJob
    from weft.plan.replan import RemainingJob
    from weft.plan.simulate.deploy_forecast import DeployForecast
    from weft.spec import AdapterSpec, RunSpec
    from weft.spec.cluster import ClusterSpec
    from weft.store.mirror import RunUrl

BAR = 16
"""Characters of the longest bar: the table fits into 80 columns."""
WORTH = 0.01
"""Least share of a step's time that makes other sums worth a line."""
MOST_NAMES = 6
"""Maximum number of jobs of a replica that are named; `--json` names all."""


def deploy(
    cluster_file: Annotated[Path, path_argument("The cluster file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the jobs file to change: defaults.gradient_sum=any_order")
    ] = None,
    profile: Annotated[
        Path | None, path_option("Plan with what `weft profile` measured of one such GPU, from this file.")
    ] = None,
    plot: Annotated[Path | None, path_option("Draw the replicas and their time into this .svg or .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    jobs_file: Annotated[
        Path | None, path_option("Plan for the jobs of this file, not the cluster file's.", "--jobs")
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Train the jobs of the jobs file as planned.")] = False,
    out: Annotated[
        Any, typer.Option(parser=run_location, metavar="PATH", help="With --execute: where results go.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --execute: continue the run there.")] = False,
    dispatch_by: DispatchBy = None,
) -> None:
    """Show which replicas a cluster should have for its jobs, and what they save.

    Seconds and memory are predicted, from the hardware table or from a profile. Nothing is trained without --execute.
    """
    from weft.plan.cost.profile import load_profile
    from weft.plan.deploy.kinds import measured_kind, read_pools, replica_kinds, time_source
    from weft.plan.simulate.deploy_forecast import forecast_deployment
    from weft.spec.cluster import load_cluster
    from weft.spec.load import located

    spec = load_cluster(cluster_file)
    for name, value in {"--out": out, "--resume": resume or None, "--dispatch": dispatch_by}.items():
        if value is not None and not execute:
            raise ConfigError("is for a run; give --execute too.", where=name)
    LayoutOptions(dispatch=dispatch_by).check_alone(())
    if execute and as_json:
        raise ConfigError("the run prints lines of its own; leave --json out.", where="--execute")
    planned = PlannedRun.of(spec, cluster_file, jobs_file, overrides or ())
    ordered = planned.to_execute(spec, cluster_file) if execute else None
    if plot is not None:
        from weft.report.figure import check_plot

        check_plot(plot)
    known = None if profile is None else load_profile(profile)
    with Console(stderr=True).status("reading the lengths and planning"):
        pools = read_pools(spec, cluster_file)
        with located(planned.jobs_file or cluster_file, overrides or ()):
            jobs, setup = planned.jobs(spec)
        profiles = {} if known is None else {measured_kind(known, setup, pools, profile): known}
        may_share = _may_share(spec, ordered)
        kinds = replica_kinds(spec.mode, setup, pools, jobs, profiles, cluster_file, may_share=may_share)
        found = forecast_deployment(kinds, {pool.name: pool.num_gpus for pool in pools}, jobs)
    source = time_source(spec, list(profiles))
    if plot is not None:
        from weft.report.figure import draw_deployment

        draw_deployment(plot, found, f"{setup.shape.name}, {found.planned.step_s:,.3g} s a step, predicted {source}")
    if as_json:
        typer.echo(json.dumps({"source": source, "mode": spec.mode, **found.to_json()}))
        return
    may_change = spec.tensor is None and not execute
    _show(found, len(jobs), output_console(), source, is_executed=execute, may_change=may_change)
    if ordered is not None:
        from weft.cli.train import Invocation, PlannedPace

        layout = found.deployment.layout
        print_line(output_console(), f"layout  {layout}\n")
        words = ["weft", "plan", "deploy", str(cluster_file), *(overrides or ())]
        words += ["--execute"] if jobs_file is None else ["--jobs", str(jobs_file), "--execute"]
        words += [] if profile is None else ["--profile", str(profile)]

        def kinds_for(left: Sequence[RemainingJob]) -> list[ReplicaKind]:
            setup = planned.setup([job.rank for job in left], [job.num_parameters for job in left])
            jobs = [job.to_deploy for job in left]
            return replica_kinds(spec.mode, setup, pools, jobs, profiles, cluster_file, may_share=may_share)

        options = LayoutOptions(
            None if layout.is_one_device else str(layout), planned=found.replicas, dispatch=dispatch_by
        )
        invocation = Invocation(tuple(words), () if dispatch_by is None else ("--dispatch", dispatch_by))
        pace = PlannedPace(found.planned.step_s, found.step_tokens)
        _train(ordered, tuple(overrides or ()), options, pools, kinds_for, out, invocation, pace, resume=resume)


def _may_share(spec: ClusterSpec, ordered: tuple[Path, RunSpec, ResolvedModel] | None) -> Callable[[int], bool]:
    """Whether so many devices may share every layer; of a run that is to be trained only if its model and jobs can."""

    @functools.cache
    def may_share(count: int) -> bool:
        if ordered is None or not spec.tensor:
            return spec.tensor is not False and ordered is None
        _, run, model = ordered
        with contextlib.suppress(ConfigError, ModelError):
            LayoutOptions(f"tensor:{count}").check(run, (), model)
            return True
        return False

    return may_share


def _train(
    ordered: tuple[Path, RunSpec, ResolvedModel],
    overrides: tuple[str, ...],
    options: LayoutOptions,
    pools: Sequence[GpuPool],
    kinds_for: Callable[[Sequence[RemainingJob]], list[ReplicaKind]],
    out: Path | RunUrl | None,
    invocation: Invocation,
    pace: PlannedPace,
    *,
    resume: bool,
) -> NoReturn:
    """Trains the jobs of a file in a layout, which is planned again when jobs come and go."""
    from weft.cli.options import ReplicaOptions
    from weft.cli.train import Order, train_order
    from weft.plan.replan import ClusterForecaster

    jobs_file, run, model = ordered
    options.check(run, (), model)
    forecast = ClusterForecaster({pool.name: pool.num_gpus for pool in pools}, kinds_for)
    # Only on CPUs: it is untested whether closed replicas leave a GPU's memory free for others.
    # Other degrees of tensor parallelism would change bits, at a moment that depends on a clock.
    may_change = sum(forecast.pools.values()) > 1 and model.is_cpu and max(options.chosen.degrees) == 1
    may_follow = forecast if may_change else None
    order = Order(run, jobs_file, overrides, False, ReplicaOptions(), options, invocation, model, may_follow, pace)
    train_order(order, out or run_location(run.output_dir, f"{jobs_file}: output_dir"), resume=resume)


@dataclass(frozen=True)
class PlannedRun:
    base_model: str
    quantize: str
    recompute: str
    gpu: str
    """Kind of the first machine's GPUs."""
    jobs_file: Path | None
    """Jobs file; None: jobs are described in the cluster file, by their lengths."""
    run: RunSpec | None
    """Settings and jobs of the jobs file; None without one."""

    @classmethod
    def of(cls, spec: ClusterSpec, path: Path, jobs_file: Path | None, overrides: Sequence[str] = ()) -> PlannedRun:
        """The settings of a cluster file, completed from the jobs file: that of `--jobs`, or the one it names."""
        if jobs_file is None and spec.jobs_file is not None:
            jobs_file = path.parent / spec.jobs_file
        run = None
        if jobs_file is not None:
            from weft.spec import load_run

            run = load_run(jobs_file, overrides)
            base_model, quantize, recompute = run.base_model, run.quantize, run.recompute
        elif overrides:
            raise ConfigError(f"got {overrides[0]!r}; settings change a jobs file, so name one.", where="--jobs")
        elif not spec.jobs:
            raise ConfigError(
                "there are no jobs to plan for; name a jobs file by --jobs, or write jobs.", where=f"{path}: jobs"
            )
        elif spec.base_model is None:
            raise ConfigError("is missing; jobs without a jobs file need it.", where=f"{path}: base_model")
        else:
            base_model, quantize, recompute = spec.base_model, "none", "none"
        stored = (spec.quantize or quantize, spec.recompute or recompute)
        return cls(spec.base_model or base_model, *stored, spec.machines[0].gpu, jobs_file, run)

    def to_execute(self, spec: ClusterSpec, path: Path) -> tuple[Path, RunSpec, ResolvedModel]:
        """The jobs file, its run and the model; ConfigError if this process cannot train them as planned."""
        from weft.model.resolve import resolve

        run = self.run
        if self.jobs_file is None or run is None:
            message = "jobs are known by their lengths only; name a jobs file by --jobs, or as jobs_file."
            raise ConfigError(message, where=f"--execute: {path}")
        if spec.mode != "packed":
            message = f"{spec.mode} can only be planned, since runs pack samples; leave it out, or --execute."
            raise ConfigError(message, where=f"{path}: mode")
        for name in ("base_model", "quantize", "recompute"):
            planned, given = getattr(self, name), getattr(run, name)
            if planned != given:
                message = f"is {given} there and {planned} in {path}; leave it out of the latter."
                raise ConfigError(message, where=f"{self.jobs_file}: {name}")
        model = resolve(run.backbone)
        for index, machine in enumerate(spec.machines):
            if (machine.gpu == "cpu") != model.is_cpu:
                here = "CPU" if model.is_cpu else "GPU"
                message = f"plans for {machine.gpu}, and the run would be on a {here}; name the device of this machine."
                raise ConfigError(message, where=f"{path}: machines.{index}.gpu")
        num = sum(machine.count for machine in spec.machines)
        if num > 1:
            message = f"has {num} machines; the replicas of one run are processes of this machine, so name one."
            raise ConfigError(message, where=f"{path}: machines")
        return self.jobs_file, run, model

    @functools.cached_property
    def model(self) -> ResolvedModel | None:
        """The model, whose configuration is read; None for the name of a published shape."""
        from weft.model.resolve import resolve
        from weft.plan.cost.hardware import find_hardware
        from weft.plan.cost.shape import EMBEDDED, SHAPES
        from weft.spec import BackboneSpec

        if self.base_model in SHAPES and self.base_model != EMBEDDED:
            return None
        spec = BackboneSpec(self.base_model, quantize=self.quantize, recompute=self.recompute)
        return resolve(spec, find_hardware(self.gpu))

    @functools.cached_property
    def adapters(self) -> list[AdapterSpec]:
        return [] if self.run is None else [job.adapter for job in self.run.jobs]

    def setup(self, ranks: Sequence[int], num_parameters: Sequence[int | None] = ()) -> BackboneSetup:
        from weft.plan.cost.analytic import BackboneSetup
        from weft.plan.cost.shape import SHAPES, ModelShape

        if self.model is not None:
            return self.model.setup(ranks, num_parameters, self.adapters)
        shape = ModelShape.from_config(SHAPES[self.base_model].config().to_dict(), self.base_model)
        return BackboneSetup(shape, tuple(ranks), self.quantize, self.recompute)

    def jobs(self, spec: ClusterSpec) -> tuple[list[DeployJob], BackboneSetup]:
        """The jobs, and the basis of cost models with their adapters."""
        from weft.methods.registry import cost_ranks
        from weft.plan.deploy.types import DeployJob, LengthSpread

        if self.jobs_file is not None and self.run is not None:
            sizes = [] if self.model is None else self.model.adapter_sizes(self.adapters)
            setup = self.setup([cost_ranks(adapter).widest for adapter in self.adapters], sizes)
            return _read_jobs(self.run, self.jobs_file.parent), setup
        jobs = [
            DeployJob(
                job.name, job.global_batch_size, LengthSpread(**vars(job.lengths)), job.gradient_sum == "any_order"
            )
            for job in spec.jobs
        ]
        return jobs, self.setup([job.r for job in spec.jobs])


def _read_jobs(run: RunSpec, base_dir: Path) -> list[DeployJob]:
    """The jobs of a jobs file with their lengths."""
    from weft.data.load import load_job_data
    from weft.model.source import load_tokenizer
    from weft.plan.deploy.types import DeployJob, KnownLengths, batch_samples

    tokenizer = load_tokenizer(run.base_model)
    jobs = []
    for job in run.jobs:
        data = load_job_data(job, tokenizer, base_dir).train
        lengths = tuple(int(n) for n in data.samples.lengths)
        size = batch_samples(job.batch_size, data.num_groups, len(lengths))
        jobs.append(DeployJob(job.name, size, KnownLengths(lengths), job.gradient_sum == "any_order"))
    return jobs


def _show(
    found: DeployForecast, num_jobs: int, console: Console, source: str, *, is_executed: bool, may_change: bool
) -> None:
    plan, planned = found.deployment, found.planned
    console.print(_replica_table(found))
    tried = "all were tried or ruled out" if plan.is_complete else "not all were tried"
    lines = [
        f"plan  {plan.gpus_used} of {plan.problem.num_gpus} GPUs; of {plan.num_plans:,.0f} plans {tried}, "
        f"none can be over {plan.gap:.1%} faster",
        f"step  about {planned.step_s:,.3g} s, {planned.gpu_seconds:,.4g} GPU-seconds, for a global batch of every job",
        f"      predicted {source}" + ("" if is_executed else "; nothing was run"),
    ]
    if may_change and any(kind.layout.tensor > 1 for kind in plan.replicas):
        lines.append("      --execute plans without tensor:N, so with other replicas, unless the file has tensor: true")
    homes = found.replicas.homes
    if homes:
        lines.insert(1, f"jobs  {len(homes)} of {num_jobs} with gradient_sum in_order, each at home on one replica")
        lines.insert(2, f"homes {_home_lines(found, homes)}")
        lines += _sums_lines(found)
    print_line(console, "\n".join(lines))
    console.print(_choice_table(found))


def _sums_lines(found: DeployForecast) -> list[str]:
    """What sums that do not depend on the order would save, if it is something."""
    before_s = found.planned.step_s
    after_s = next((choice.step_s for choice in found.choices if choice.name == "any order"), before_s)
    if after_s > (1 - WORTH) * before_s:
        return []
    return [
        f"sums  if replicas shared all jobs, a step would take {after_s:,.3g} s, {1 - after_s / before_s:.1%} less:",
        "      add defaults.gradient_sum=any_order, for all jobs that do not set it (once, their bits change)",
    ]


def _home_lines(found: DeployForecast, homes: Mapping[str, int]) -> str:
    parts = []
    for index, kind in enumerate(found.deployment.replicas):
        jobs = [job for job, home in homes.items() if home == index]
        if jobs:
            names = ", ".join(jobs) if len(jobs) <= MOST_NAMES else counted(len(jobs), "job")
            parts.append(f"replica {index} ({kind.layout}): {names}")
    return "; ".join(parts)


def _replica_table(found: DeployForecast) -> Table:
    """A line for every kind of replica, with the first drawn batch on it."""
    plan, shared = found.deployment, found.shared
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("replicas", "GPUs", "holds", "samples", "longest", "seconds"):
        table.add_column(name, justify="left" if name == "replicas" else "right", no_wrap=True)
    table.add_column("busy in a step", no_wrap=True)
    several = len(plan.problem.pools) > 1
    for kind in dict.fromkeys(plan.replicas):
        alike = [index for index, other in enumerate(plan.replicas) if other is kind]
        counts = [sum(shared.counts[index][bucket] for index in alike) for bucket in range(len(found.bounds))]
        longest = max((bound for bound, count in zip(found.bounds, counts, strict=True) if count), default=0)
        seconds = sum(shared.seconds[index] for index in alike) / len(alike)
        full = round(BAR * seconds / shared.step_s)
        table.add_row(
            f"{kind.layout} × {len(alike)}" + (f" {kind.pool}" if several else ""),
            str(kind.num_gpus),
            f"{kind.model.most_tokens:,}",
            f"{sum(counts):,}",
            f"{longest:,}",
            f"{seconds:,.3g}",
            "█" * full + "·" * (BAR - full),
        )
    return table


def _choice_table(found: DeployForecast) -> Table:
    meanings = {
        "planned": "these replicas, balanced",
        "by length": "these replicas, by length",
        "any order": "all jobs any_order, balanced",
        "alike": "alike replicas, even shares",
        "in turn, alike": "one job after another, alike",
        "in turn, planned": "one job after another, planned",
    }
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("way", "replicas", "step s", "GPU-seconds", "saved"):
        table.add_column(name, justify="left" if name in ("way", "replicas") else "right", no_wrap=name != "replicas")
    for choice in found.choices:
        saved = 1 - found.planned.gpu_seconds / choice.gpu_seconds
        shown = "" if choice is found.planned else f"{saved:.1%}"
        table.add_row(meanings[choice.name], choice.plan, f"{choice.step_s:,.3g}", f"{choice.gpu_seconds:,.4g}", shown)
    return table
