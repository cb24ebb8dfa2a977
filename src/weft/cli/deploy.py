"""`weft plan deploy`: which replicas a cluster should have for its jobs; nothing is trained, all is predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.user_path import run_place, user_path
from weft.errors import ConfigError, PlanError
from weft.report.console import output_console

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weft.cli.train import Said
    from weft.cost.profile import Profile
    from weft.cost.shape import ModelShape
    from weft.plan.deploy import ReplicaKind
    from weft.plan.deploy.kinds import BackboneSetup, GpuPool
    from weft.plan.deploy.workload import DeployJob
    from weft.plan.dispatch import ReplicaLayout
    from weft.plan.layout import Layout
    from weft.plan.replan import RemainingJob
    from weft.plan.replan.cluster import ClusterForecaster
    from weft.simulate.deploy_forecast import DeployForecast
    from weft.spec.cluster import ClusterSpec, MachineSpec
    from weft.store.remote.run_url import RunUrl

GIB, GB = 2**30, 1e9
BAR = 40
"""Characters of the longest bar."""


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
    execute: Annotated[
        Path | None,
        typer.Option(
            parser=user_path, metavar="PATH", help="Plan for the jobs of this file, and train them as planned."
        ),
    ] = None,
    out: Annotated[
        Any, typer.Option(parser=run_place, metavar="PATH", help="With --execute: where results go.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --execute: go on with the run there.")] = False,
) -> None:
    """Show which replicas a cluster should have for its jobs, and what they save.

    Seconds and memory are predicted, from the hardware table or from a profile. Nothing is trained without --execute.
    """
    from weft.cost.profile import load_profile
    from weft.simulate.deploy_forecast import forecast_deployment
    from weft.spec.cluster import load_cluster

    spec = load_cluster(cluster_file)
    if execute is None and (out is not None or resume):
        raise ConfigError("is for a run; give --execute FILE too.", where="--out" if out is not None else "--resume")
    if execute is not None:
        if as_json:
            raise ConfigError("the run prints lines of its own; leave --json out.", where="--execute")
        spec = _to_execute(spec, execute, cluster_file)
    if plot is not None:
        from weft.bench.report import check_plot

        check_plot(plot)
    known = None if profile is None else load_profile(profile)
    with Console(stderr=True).status("reading the lengths and planning"):
        pools = _pools(spec, cluster_file)
        jobs, ranks = _jobs(spec, cluster_file)
        setup = _setup(spec, ranks)
        profiles = {} if known is None else {_measured(known, setup, pools, profile): known}
        kinds = _kinds(spec, setup, pools, jobs, profiles, cluster_file, is_executed=execute is not None)
        found = forecast_deployment(kinds, {pool.name: pool.num_gpus for pool in pools}, jobs)
    source = _source(spec, list(profiles))
    if plot is not None:
        from weft.report.deploy_picture import draw_deployment

        draw_deployment(plot, found, f"{setup.shape.name}, {found.planned.step_s:,.3g} s a step, predicted {source}")
    if as_json:
        typer.echo(json.dumps({"source": source, "mode": spec.mode, **found.to_json()}))
        return
    _show(found, output_console(), source, is_executed=execute is not None)
    if execute is not None:
        from weft.cli.train import Said

        layout = found.deployment.run_layout
        output_console().print(f"layout  {layout}\n", markup=False, highlight=False)
        words = ["weft", "plan", "deploy", str(cluster_file), "--execute", str(execute)]
        words += [] if profile is None else ["--profile", str(profile)]
        forecast = _forecaster(spec, pools, profiles, cluster_file)
        _train(execute, layout, forecast, out, Said(tuple(words)), resume=resume)


def _train(
    jobs_file: Path, layout: Layout, forecast: ClusterForecaster, out: Path | RunUrl | None, said: Said, *, resume: bool
) -> NoReturn:
    """Trains the jobs of a file in a layout, which is planned anew when they come and go."""
    from weft.backbone.load import choose_device
    from weft.cli.layout_options import LayoutOptions
    from weft.cli.replica_options import ReplicaOptions
    from weft.cli.train import Order, train_order
    from weft.kernels.device import is_cpu
    from weft.spec import load_run

    run, options = load_run(jobs_file), LayoutOptions(None if layout.is_one_device else str(layout))
    options.check(run, ())
    # Whether a GPU's memory is free for other replicas once its own are closed, nobody has tried.
    may_change = sum(forecast.pools.values()) > 1 and is_cpu(choose_device(run.backbone))
    order = Order(run, jobs_file, (), False, ReplicaOptions(), options, said, forecast if may_change else None)
    train_order(order, out or run_place(run.output_dir), resume=resume)


def _forecaster(
    spec: ClusterSpec, pools: Sequence[GpuPool], profiles: Mapping[str, Profile], path: Path
) -> ClusterForecaster:
    from weft.plan.replan.cluster import ClusterForecaster

    def kinds_for(jobs: Sequence[RemainingJob]) -> list[ReplicaKind]:
        setup = _setup(spec, tuple(job.rank for job in jobs))
        return _kinds(spec, setup, pools, [job.to_deploy for job in jobs], profiles, path, is_executed=True)

    return ClusterForecaster({pool.name: pool.num_gpus for pool in pools}, kinds_for)


def _to_execute(spec: ClusterSpec, jobs_file: Path, path: Path) -> ClusterSpec:
    """The same cluster for the jobs of a file; refuses what could not be trained from here."""
    from weft.backbone.load import choose_device
    from weft.kernels.device import is_cpu
    from weft.spec import load_run

    run = load_run(jobs_file)
    if run.base_model != spec.base_model:
        found = f"trains {run.base_model}; {path} is about {spec.base_model}."
        raise ConfigError(found, where=f"--execute {jobs_file}")
    on_cpu = is_cpu(choose_device(run.backbone))
    for place, machine in enumerate(spec.machines):
        if (machine.gpu == "cpu") != on_cpu:
            found = (
                f"plans for {machine.gpu}, and the run would be on a {'CPU' if on_cpu else 'GPU'}; name what is here."
            )
            raise ConfigError(found, where=f"{path}: machines.{place}.gpu")
    num = sum(machine.count for machine in spec.machines)
    if num > 1:
        found = f"has {num} machines; the replicas of one run are processes of this machine, so name one."
        raise ConfigError(found, where=f"{path}: machines")
    return replace(spec, jobs=(), jobs_file=str(jobs_file.resolve()))


def _pools(spec: ClusterSpec, path: Path) -> list[GpuPool]:
    """The machines with their rates; machines of one kind are told apart by their place."""
    names = [machine.gpu for machine in spec.machines]
    pools = []
    for place, machine in enumerate(spec.machines):
        name = machine.gpu if names.count(machine.gpu) == 1 else f"{machine.gpu} ({place + 1})"
        try:
            pools.append(_pool(machine, name))
        except ConfigError as error:
            raise error.at(f"{path}: machines.{place}.gpu") from None
    return pools


def _pool(machine: MachineSpec, name: str) -> GpuPool:
    from weft.cost.hardware import find_hardware
    from weft.plan.deploy.kinds import GpuPool

    table = find_hardware(machine.gpu)
    network = table.network_rate * machine.gpus if machine.network_gb_s is None else machine.network_gb_s * GB
    hardware = replace(
        table,
        memory_bytes=table.memory_bytes if machine.memory_gib is None else int(machine.memory_gib * GIB),
        link_rate=table.link_rate if machine.link_gb_s is None else machine.link_gb_s * GB,
    )
    return GpuPool(name, hardware, machine.gpus, machine.count, network)


def _jobs(spec: ClusterSpec, path: Path) -> tuple[list[DeployJob], tuple[int, ...]]:
    """The jobs and the ranks of their adapters."""
    from weft.plan.deploy.workload import DeployJob, LengthSpread

    if spec.jobs_file is not None:
        return _read_jobs(path.parent / spec.jobs_file)
    jobs = [DeployJob(job.name, job.global_batch_size, LengthSpread(**vars(job.lengths))) for job in spec.jobs]
    return jobs, tuple(job.r for job in spec.jobs)


def _read_jobs(path: Path) -> tuple[list[DeployJob], tuple[int, ...]]:
    """The jobs of a jobs file, with the lengths of their own samples."""
    from weft.adapters.methods import cost_ranks
    from weft.backbone.source import load_tokenizer
    from weft.data.load import load_job_data
    from weft.plan.deploy.workload import DeployJob, KnownLengths
    from weft.spec import load_run

    run = load_run(path)
    tokenizer = load_tokenizer(run.base_model)
    jobs = []
    for job in run.jobs:
        lengths = load_job_data(job, tokenizer, path.parent).train.samples.lengths
        jobs.append(DeployJob(job.name, job.batch_size, KnownLengths(tuple(int(n) for n in lengths))))
    return jobs, tuple(cost_ranks(job.adapter).widest for job in run.jobs)


def _setup(spec: ClusterSpec, ranks: tuple[int, ...]) -> BackboneSetup:
    from weft.plan.deploy.kinds import BackboneSetup

    return BackboneSetup(_shape(spec.base_model), ranks, spec.quantize, spec.recompute)


def _shape(base_model: str) -> ModelShape:
    """The sizes of a published shape, or of a model whose configuration is there."""
    from weft.backbone.load import load_config
    from weft.backbone.source import find_source
    from weft.bench.profiled import EMBEDDED
    from weft.bench.shapes import SHAPES
    from weft.cost.shape import ModelShape

    if base_model in SHAPES and base_model != EMBEDDED:
        return ModelShape.from_config(SHAPES[base_model].config().to_dict(), base_model)
    return ModelShape.from_config(load_config(find_source(base_model)), base_model)


def _measured(known: Profile, setup: BackboneSetup, pools: Sequence[GpuPool], path: Path | None) -> str:
    """The kind of GPU that a profile is of, which must be in the cluster."""
    from weft.cli.plan import check_profile
    from weft.cost.hardware import find_hardware

    check_profile(known, setup.shape, setup.quantize, setup.recompute, path)
    kind = find_hardware(known.setup.device).name
    if kind not in {pool.hardware.name for pool in pools}:
        names = ", ".join(dict.fromkeys(pool.hardware.name for pool in pools))
        raise ConfigError(f"is of {known.setup.device}; the cluster has {names}.", where=f"--profile {path}")
    return kind


def _kinds(
    spec: ClusterSpec,
    setup: BackboneSetup,
    pools: Sequence[GpuPool],
    jobs: Sequence[DeployJob],
    profiles: Mapping[str, Profile],
    path: Path,
    *,
    is_executed: bool = False,
) -> list[ReplicaKind]:
    """Every kind of replica, or those that can be trained; refuses what fits nowhere, with the arithmetic."""
    from weft.plan.deploy.kinds import kinds_on

    longest = max(jobs, key=lambda job: job.lengths.longest)
    found = [
        kind
        for pool in pools
        for kind in kinds_on(
            pool,
            setup,
            longest.lengths.longest,
            profile=profiles.get(pool.hardware.name),
            is_packed=spec.mode == "packed",
        )
        # Products are not divided over GPUs yet.
        if not is_executed or kind.layout.tensor_parallel == 1
    ]
    if not found:
        raise PlanError(_why_no_room(setup, max(pools, key=_bytes_of)), where=f"{path}: base_model {spec.base_model}")
    largest = max(found, key=lambda kind: kind.model.most_tokens)
    if longest.lengths.longest > largest.model.most_tokens:
        pool = next(pool for pool in pools if pool.name == largest.pool)
        raise PlanError(_why_too_long(setup, pool, largest, longest), where=f"{path}: job {longest.name}")
    return found


def _bytes_of(pool: GpuPool) -> int:
    return pool.num_gpus * pool.hardware.memory_bytes


def _why_no_room(setup: BackboneSetup, pool: GpuPool) -> str:
    from weft.plan.deploy.kinds import MIN_TOKENS, layouts_on

    def needs(layout: ReplicaLayout) -> int:
        memory = setup.memory(layout, pool.hardware)
        return max(
            memory.total_bytes(MIN_TOKENS, setup.ranks, stage=stage, num_held=layout.num_stages - stage)
            for stage in {0, layout.num_stages - 1}
        )

    best = min(layouts_on(pool, setup.shape), key=needs)
    weights = setup.memory(best, pool.hardware).weight_bytes()
    return (
        f"fits on no layout of {pool.num_gpus} {pool.name}: with {best} each GPU needs {needs(best) / GIB:,.1f} GiB "
        f"({weights / GIB:,.1f} of weights, the rest for adapters and a chunk of {MIN_TOKENS} tokens) "
        f"and has {pool.hardware.memory_bytes / GIB:,.1f}; use more or larger GPUs, or quantize."
    )


def _why_too_long(setup: BackboneSetup, pool: GpuPool, largest: ReplicaKind, job: DeployJob) -> str:
    memory = setup.memory(largest.layout, pool.hardware)
    held = largest.layout.num_stages
    fixed = memory.total_bytes(0, setup.ranks, num_held=held)
    token = (memory.total_bytes(1024, setup.ranks, num_held=held) - fixed) / 1024
    return (
        f"its longest sample has {job.lengths.longest:,} tokens; the largest replica, {largest.layout} on {pool.name}, "
        f"holds {largest.model.most_tokens:,}: of {pool.hardware.memory_bytes / GIB:,.1f} GiB a GPU {fixed / GIB:,.1f} "
        f"are taken, and a token takes {token / 2**20:,.2f} MiB; cut the samples, or use more GPUs or recompute."
    )


def _source(spec: ClusterSpec, measured: Sequence[str]) -> str:
    """Where the seconds come from, in words."""
    links = " and ".join(dict.fromkeys(machine.links for machine in spec.machines))
    times = "".join(f"a profile of {name} and " for name in measured) + "the hardware table"
    return f"from {times}, links {links}"


def _show(found: DeployForecast, console: Console, source: str, *, is_executed: bool) -> None:
    plan, planned = found.deployment, found.planned
    console.print(_replica_table(found))
    of_all = f"none of {plan.num_plans:,.0f} plans was found better" if plan.is_complete else "not all plans were tried"
    lines = [
        f"plan  {plan.gpus_used} of {plan.problem.num_gpus} GPUs; {of_all}, none can be over {plan.gap:.1%} faster",
        f"step  about {planned.step_s:,.3g} s, {planned.gpu_seconds:,.4g} GPU-seconds, for a global batch of every job",
        f"      predicted {source}" + ("" if is_executed else "; nothing was run"),
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(_choice_table(found))


def _replica_table(found: DeployForecast) -> Table:
    """A line for every kind of replica, with the first drawn batch on it."""
    plan, shared = found.deployment, found.shared
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("replicas", "GPUs each", "holds", "samples", "longest", "seconds"):
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
        "planned": "these replicas, balanced dispatch",
        "by length": "these replicas, each sample to its cheapest",
        "alike": "alike replicas, even shares",
        "in turn, alike": "one job after another, alike replicas",
        "in turn, planned": "one job after another, planned replicas",
    }
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("way", "replicas", "step s", "GPU-seconds", "planned saves"):
        table.add_column(name, justify="left" if name in ("way", "replicas") else "right", no_wrap=name != "replicas")
    for choice in found.choices:
        saved = 1 - found.planned.gpu_seconds / choice.gpu_seconds
        shown = "" if choice is found.planned else f"{saved:.1%}"
        table.add_row(meanings[choice.name], choice.plan, f"{choice.step_s:,.3g}", f"{choice.gpu_seconds:,.4g}", shown)
    return table
