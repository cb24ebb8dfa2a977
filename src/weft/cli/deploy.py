"""`weft plan deploy`: which replicas a cluster should have for its jobs; nothing is trained, all is predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.options import path_argument, path_option, run_location
from weft.errors import ConfigError, counted
from weft.report.readable import output_console, print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weft.cli.options import LayoutOptions
    from weft.cli.train import Invocation
    from weft.model.resolve import ResolvedModel
    from weft.plan.cost.analytic import BackboneSetup
    from weft.plan.cost.shape import ModelShape
    from weft.plan.deploy import ReplicaKind
    from weft.plan.deploy.kinds import GpuPool
    from weft.plan.deploy.types import DeployJob
    from weft.plan.replan import RemainingJob
    from weft.plan.simulate.deploy_forecast import DeployForecast
    from weft.spec import RunSpec
    from weft.spec.cluster import ClusterSpec
    from weft.store.mirror import RunUrl

BAR = 16
"""Characters of the longest bar: the table fits into 80 columns."""
MOST_NAMES = 6
"""Maximum number of jobs of a replica that are named; `--json` names all."""


def deploy(
    cluster_file: Annotated[Path, path_argument("The cluster file.")],
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
    resume: Annotated[bool, typer.Option("--resume", help="With --execute: go on with the run there.")] = False,
) -> None:
    """Show which replicas a cluster should have for its jobs, and what they save.

    Seconds and memory are predicted, from the hardware table or from a profile. Nothing is trained without --execute.
    """
    from weft.plan.cost.profile import load_profile
    from weft.plan.deploy.kinds import measured_kind, read_pools, replica_kinds, time_source
    from weft.plan.simulate.deploy_forecast import forecast_deployment
    from weft.spec.cluster import load_cluster

    spec = load_cluster(cluster_file)
    if not execute and (out is not None or resume):
        raise ConfigError("is for a run; give --execute too.", where="--out" if out is not None else "--resume")
    if execute and as_json:
        raise ConfigError("the run prints lines of its own; leave --json out.", where="--execute")
    planned = PlannedRun.of(spec, cluster_file, jobs_file)
    ordered = planned.to_execute(spec, cluster_file) if execute else None
    if plot is not None:
        from weft.report.figure import check_plot

        check_plot(plot)
    known = None if profile is None else load_profile(profile)
    with Console(stderr=True).status("reading the lengths and planning"):
        pools = read_pools(spec, cluster_file)
        jobs, ranks = planned.jobs(spec)
        setup = planned.setup(ranks)
        profiles = {} if known is None else {measured_kind(known, setup, pools, profile): known}
        kinds = replica_kinds(spec.mode, setup, pools, jobs, profiles, cluster_file, is_executed=execute)
        found = forecast_deployment(kinds, {pool.name: pool.num_gpus for pool in pools}, jobs)
    source = time_source(spec, list(profiles))
    if plot is not None:
        from weft.report.figure import draw_deployment

        draw_deployment(plot, found, f"{setup.shape.name}, {found.planned.step_s:,.3g} s a step, predicted {source}")
    if as_json:
        typer.echo(json.dumps({"source": source, "mode": spec.mode, **found.to_json()}))
        return
    _show(found, len(jobs), output_console(), source, is_executed=execute)
    if ordered is not None:
        from weft.cli.options import LayoutOptions
        from weft.cli.train import Invocation

        layout = found.deployment.layout
        print_line(output_console(), f"layout  {layout}\n")
        words = ["weft", "plan", "deploy", str(cluster_file)]
        words += ["--execute"] if jobs_file is None else ["--jobs", str(jobs_file), "--execute"]
        words += [] if profile is None else ["--profile", str(profile)]

        def kinds_for(left: Sequence[RemainingJob]) -> list[ReplicaKind]:
            setup = planned.setup(tuple(job.rank for job in left))
            jobs = [job.to_deploy for job in left]
            return replica_kinds(spec.mode, setup, pools, jobs, profiles, cluster_file, is_executed=True)

        options = LayoutOptions(None if layout.is_one_device else str(layout), planned=found.replicas)
        _train(ordered, options, pools, kinds_for, out, Invocation(tuple(words)), resume=resume)


def _train(
    ordered: tuple[Path, RunSpec, ResolvedModel],
    options: LayoutOptions,
    pools: Sequence[GpuPool],
    kinds_for: Callable[[Sequence[RemainingJob]], list[ReplicaKind]],
    out: Path | RunUrl | None,
    invocation: Invocation,
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
    may_change = sum(forecast.pools.values()) > 1 and model.is_cpu
    order = Order(
        run, jobs_file, (), False, ReplicaOptions(), options, invocation, model, forecast if may_change else None
    )
    train_order(order, out or run_location(run.output_dir, f"{jobs_file}: output_dir"), resume=resume)


@dataclass(frozen=True)
class PlannedRun:
    base_model: str
    quantize: str
    recompute: str
    jobs_file: Path | None
    """Jobs file; None: jobs are described in the cluster file, by their lengths."""

    @classmethod
    def of(cls, spec: ClusterSpec, path: Path, jobs_file: Path | None) -> PlannedRun:
        """The settings of a cluster file, completed from the jobs file: that of `--jobs`, or the one it names."""
        if jobs_file is None and spec.jobs_file is not None:
            jobs_file = path.parent / spec.jobs_file
        if jobs_file is not None:
            from weft.spec import load_run

            run = load_run(jobs_file)
            base_model, quantize, recompute = run.base_model, run.quantize, run.recompute
        elif not spec.jobs:
            raise ConfigError(
                "there are no jobs to plan for; name a jobs file by --jobs, or write jobs.", where=f"{path}: jobs"
            )
        elif spec.base_model is None:
            raise ConfigError("is missing; jobs without a jobs file need it.", where=f"{path}: base_model")
        else:
            base_model, quantize, recompute = spec.base_model, "none", "none"
        return cls(spec.base_model or base_model, spec.quantize or quantize, spec.recompute or recompute, jobs_file)

    def to_execute(self, spec: ClusterSpec, path: Path) -> tuple[Path, RunSpec, ResolvedModel]:
        """The jobs file, its run and the model; ConfigError if this process cannot train them as planned."""
        from weft.model.resolve import resolve
        from weft.spec import load_run

        if self.jobs_file is None:
            message = "jobs are known by their lengths only; name a jobs file by --jobs, or as jobs_file."
            raise ConfigError(message, where=f"--execute: {path}")
        if spec.mode != "packed":
            message = f"{spec.mode} can only be planned, since runs pack samples; leave it out, or --execute."
            raise ConfigError(message, where=f"{path}: mode")
        run = load_run(self.jobs_file)
        for name in ("base_model", "quantize", "recompute"):
            planned, given = getattr(self, name), getattr(run, name)
            if planned != given:
                message = f"is {given} there and {planned} in {path}; leave it out of the latter."
                raise ConfigError(message, where=f"{self.jobs_file}: {name}")
        model = resolve(run.backbone)
        for index, machine in enumerate(spec.machines):
            if (machine.gpu == "cpu") != model.is_cpu:
                here = "CPU" if model.is_cpu else "GPU"
                message = f"plans for {machine.gpu}, and the run would be on a {here}; name what is here."
                raise ConfigError(message, where=f"{path}: machines.{index}.gpu")
        num = sum(machine.count for machine in spec.machines)
        if num > 1:
            message = f"has {num} machines; the replicas of one run are processes of this machine, so name one."
            raise ConfigError(message, where=f"{path}: machines")
        return self.jobs_file, run, model

    def setup(self, ranks: tuple[int, ...]) -> BackboneSetup:
        from weft.plan.cost.analytic import BackboneSetup

        return BackboneSetup(_shape(self.base_model), ranks, self.quantize, self.recompute)

    def jobs(self, spec: ClusterSpec) -> tuple[list[DeployJob], tuple[int, ...]]:
        from weft.plan.deploy.types import DeployJob, LengthSpread

        if self.jobs_file is not None:
            return _read_jobs(self.jobs_file)
        jobs = [
            DeployJob(
                job.name, job.global_batch_size, LengthSpread(**vars(job.lengths)), job.gradient_sum == "any_order"
            )
            for job in spec.jobs
        ]
        return jobs, tuple(job.r for job in spec.jobs)


def _read_jobs(path: Path) -> tuple[list[DeployJob], tuple[int, ...]]:
    """The jobs of a jobs file with their lengths, and the ranks of their adapters."""
    from weft.data.load import load_job_data
    from weft.methods.registry import cost_ranks
    from weft.model.source import load_tokenizer
    from weft.plan.deploy.types import DeployJob, KnownLengths, batch_samples
    from weft.spec import load_run

    run = load_run(path)
    tokenizer = load_tokenizer(run.base_model)
    jobs = []
    for job in run.jobs:
        data = load_job_data(job, tokenizer, path.parent).train
        lengths = tuple(int(n) for n in data.samples.lengths)
        size = batch_samples(job.batch_size, data.num_groups, len(lengths))
        jobs.append(DeployJob(job.name, size, KnownLengths(lengths), job.gradient_sum == "any_order"))
    return jobs, tuple(cost_ranks(job.adapter).widest for job in run.jobs)


def _shape(base_model: str) -> ModelShape:
    """The sizes of a published shape, or of a model whose configuration can be read."""
    from weft.model.resolve import resolve
    from weft.plan.cost.shape import EMBEDDED, SHAPES, ModelShape
    from weft.spec import BackboneSpec

    if base_model in SHAPES and base_model != EMBEDDED:
        return ModelShape.from_config(SHAPES[base_model].config().to_dict(), base_model)
    return resolve(BackboneSpec(base_model)).shape


def _show(found: DeployForecast, num_jobs: int, console: Console, source: str, *, is_executed: bool) -> None:
    plan, planned = found.deployment, found.planned
    console.print(_replica_table(found))
    tried = "all were tried or ruled out" if plan.is_complete else "not all were tried"
    lines = [
        f"plan  {plan.gpus_used} of {plan.problem.num_gpus} GPUs; of {plan.num_plans:,.0f} plans {tried}, "
        f"none can be over {plan.gap:.1%} faster",
        f"step  about {planned.step_s:,.3g} s, {planned.gpu_seconds:,.4g} GPU-seconds, for a global batch of every job",
        f"      predicted {source}" + ("" if is_executed else "; nothing was run"),
    ]
    if any(kind.layout.tensor > 1 for kind in plan.replicas):
        lines.append("      --execute plans without tensor parallelism, so with other replicas than these")
    homes = found.replicas.homes
    if homes:
        lines.insert(1, f"jobs  {len(homes)} of {num_jobs} with gradient_sum in_order, each at home on one replica")
        lines.insert(2, f"homes {_home_lines(found, homes)}")
    print_line(console, "\n".join(lines))
    console.print(_choice_table(found))


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
