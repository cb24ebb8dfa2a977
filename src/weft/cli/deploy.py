"""`weft plan deploy`: which replicas a cluster should have for its jobs; nothing is trained, all is predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.user_path import run_location, user_path
from weft.errors import ConfigError
from weft.report.readable import output_console
from weft.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weft.cli.layout_options import LayoutOptions
    from weft.cli.train import Invocation
    from weft.model.resolve import ResolvedModel
    from weft.plan.cost.analytic import BackboneSetup
    from weft.plan.cost.shape import ModelShape
    from weft.plan.deploy import ReplicaKind
    from weft.plan.deploy.kinds import GpuPool
    from weft.plan.deploy.workload import DeployJob
    from weft.plan.replan import RemainingJob
    from weft.plan.simulate.deploy_forecast import DeployForecast
    from weft.spec import RunSpec
    from weft.spec.cluster import ClusterSpec
    from weft.store.remote.run_url import RunUrl

BAR = 16
"""Characters of the longest bar: the table fits into 80 columns."""
MOST_NAMES = 6
"""Jobs of a replica that are named; of more, `--json` has the names."""


def deploy(
    cluster_file: Annotated[Path, typer.Argument(parser=user_path, metavar="PATH", help="The cluster file.")],
    profile: Annotated[
        Path | None,
        typer.Option(help="Plan with what `weft profile` measured of one such GPU, from this file."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(parser=user_path, metavar="PATH", help="Draw the replicas and their time into this .svg or .png."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    jobs_file: Annotated[
        Path | None,
        typer.Option(
            "--jobs", parser=user_path, metavar="PATH", help="Plan for the jobs of this file, not the cluster file's."
        ),
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
    from weft.plan.deploy.inputs import measured_kind, read_pools, replica_kinds, told_source
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
        from weft.report.deploy_picture import check_plot

        check_plot(plot)
    known = None if profile is None else load_profile(profile)
    with Console(stderr=True).status("reading the lengths and planning"):
        pools = read_pools(spec, cluster_file)
        jobs, ranks = planned.jobs(spec)
        setup = planned.setup(ranks)
        profiles = {} if known is None else {measured_kind(known, setup, pools, profile): known}
        kinds = replica_kinds(spec.mode, setup, pools, jobs, profiles, cluster_file, is_executed=execute)
        found = forecast_deployment(kinds, {pool.name: pool.num_gpus for pool in pools}, jobs)
    source = told_source(spec, list(profiles))
    if plot is not None:
        from weft.report.deploy_picture import draw_deployment

        draw_deployment(plot, found, f"{setup.shape.name}, {found.planned.step_s:,.3g} s a step, predicted {source}")
    if as_json:
        typer.echo(json.dumps({"source": source, "mode": spec.mode, **found.to_json()}))
        return
    _show(found, len(jobs), output_console(), source, is_executed=execute)
    if ordered is not None:
        from weft.cli.layout_options import LayoutOptions
        from weft.cli.train import Invocation

        layout = found.deployment.layout
        output_console().print(f"layout  {layout}\n", markup=False, highlight=False)
        words = ["weft", "plan", "deploy", str(cluster_file)]
        words += ["--execute"] if jobs_file is None else ["--jobs", str(jobs_file), "--execute"]
        words += [] if profile is None else ["--profile", str(profile)]

        def kinds_for(left: Sequence[RemainingJob]) -> list[ReplicaKind]:
            own = planned.setup(tuple(job.rank for job in left))
            wanted = [job.to_deploy for job in left]
            return replica_kinds(spec.mode, own, pools, wanted, profiles, cluster_file, is_executed=True)

        options = LayoutOptions(None if layout.is_one_device else str(layout), planned=found.replicas)
        _train(ordered, options, pools, kinds_for, out, Invocation(tuple(words)), resume=resume)


def _train(
    ordered: tuple[Path, RunSpec, ResolvedModel],
    options: LayoutOptions,
    pools: Sequence[GpuPool],
    kinds_for: Callable[[Sequence[RemainingJob]], list[ReplicaKind]],
    out: Path | RunUrl | None,
    said: Invocation,
    *,
    resume: bool,
) -> NoReturn:
    """Trains the jobs of a file in a layout, which is planned anew when they come and go."""
    from weft.cli.replica_options import ReplicaOptions
    from weft.cli.train import Order, train_order
    from weft.plan.replan.cluster import ClusterForecaster

    jobs_file, run, model = ordered
    options.check(run, (), model)
    forecast = ClusterForecaster({pool.name: pool.num_gpus for pool in pools}, kinds_for)
    # Whether a GPU's memory is free for other replicas once its own are closed, nobody has tried.
    may_change = sum(forecast.pools.values()) > 1 and model.is_cpu
    order = Order(run, jobs_file, (), False, ReplicaOptions(), options, said, model, forecast if may_change else None)
    train_order(order, out or run_location(run.output_dir), resume=resume)


@dataclass(frozen=True)
class PlannedRun:
    """Which jobs a cluster is planned for, and the backbone they train on."""

    base_model: str
    quantize: str
    recompute: str
    jobs_file: Path | None
    """None: jobs are known by their lengths only."""

    @classmethod
    def of(cls, spec: ClusterSpec, path: Path, jobs_file: Path | None) -> PlannedRun:
        """What a cluster file says, and for the rest the jobs file: that of `--jobs`, or the one it names."""
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
            raise ConfigError("is missing; jobs without a jobs file do not say it.", where=f"{path}: base_model")
        else:
            base_model, quantize, recompute = spec.base_model, "none", "none"
        return cls(spec.base_model or base_model, spec.quantize or quantize, spec.recompute or recompute, jobs_file)

    def to_execute(self, spec: ClusterSpec, path: Path) -> tuple[Path, RunSpec, ResolvedModel]:
        """The jobs file, its run and the model; refuses what could not be trained from here as it is planned."""
        from weft.model.resolve import resolve
        from weft.spec import load_run

        if self.jobs_file is None:
            found = "jobs are known by their lengths only; name a jobs file by --jobs, or as jobs_file."
            raise ConfigError(found, where=f"--execute: {path}")
        run = load_run(self.jobs_file)
        for name in ("base_model", "quantize", "recompute"):
            planned, own = getattr(self, name), getattr(run, name)
            if planned != own:
                found = f"is {own} there and {planned} in {path}; leave it out of the latter."
                raise ConfigError(found, where=f"{self.jobs_file}: {name}")
        model = resolve(run.backbone)
        for place, machine in enumerate(spec.machines):
            if (machine.gpu == "cpu") != model.is_cpu:
                here = "CPU" if model.is_cpu else "GPU"
                found = f"plans for {machine.gpu}, and the run would be on a {here}; name what is here."
                raise ConfigError(found, where=f"{path}: machines.{place}.gpu")
        num = sum(machine.count for machine in spec.machines)
        if num > 1:
            found = f"has {num} machines; the replicas of one run are processes of this machine, so name one."
            raise ConfigError(found, where=f"{path}: machines")
        return self.jobs_file, run, model

    def setup(self, ranks: tuple[int, ...]) -> BackboneSetup:
        """The backbone with adapters of these ranks."""
        from weft.plan.cost.analytic import BackboneSetup

        return BackboneSetup(_shape(self.base_model), ranks, self.quantize, self.recompute)

    def jobs(self, spec: ClusterSpec) -> tuple[list[DeployJob], tuple[int, ...]]:
        """The jobs and the ranks of their adapters."""
        from weft.plan.deploy.workload import DeployJob, LengthSpread

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
    """The jobs of a jobs file, with the lengths of their own samples."""
    from weft.data.load import load_job_data
    from weft.methods.registry import cost_ranks
    from weft.model.source import load_tokenizer
    from weft.plan.deploy.workload import DeployJob, KnownLengths, batch_samples
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
    """The sizes of a published shape, or of a model whose configuration is there."""
    from weft.model.resolve import resolve
    from weft.plan.cost.published_shapes import EMBEDDED, SHAPES
    from weft.plan.cost.shape import ModelShape
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
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(_choice_table(found))


def _home_lines(found: DeployForecast, homes: Mapping[str, int]) -> str:
    """Who is at home where, replicas by their place in the layout; of many jobs how many."""
    parts = []
    for place, kind in enumerate(found.deployment.replicas):
        own = [job for job, home in homes.items() if home == place]
        if own:
            told = ", ".join(own) if len(own) <= MOST_NAMES else counted(len(own), "job")
            parts.append(f"replica {place} ({kind.layout}): {told}")
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
        own = [place for place, other in enumerate(plan.replicas) if other is kind]
        counts = [sum(shared.counts[place][bucket] for place in own) for bucket in range(len(found.bounds))]
        longest = max((bound for bound, count in zip(found.bounds, counts, strict=True) if count), default=0)
        seconds = sum(shared.seconds[place] for place in own) / len(own)
        full = round(BAR * seconds / shared.step_s)
        table.add_row(
            f"{kind.layout} × {len(own)}" + (f" {kind.pool}" if several else ""),
            str(kind.num_gpus),
            f"{kind.model.most_tokens:,}",
            f"{sum(counts):,}",
            f"{longest:,}",
            f"{seconds:,.3g}",
            "█" * full + "·" * (BAR - full),
        )
    return table


def _choice_table(found: DeployForecast) -> Table:
    """What the plan is compared with."""
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
