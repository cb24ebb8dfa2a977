"""`weft plan`: what will train with what, how full, how long and in how much memory; nothing is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.user_path import user_path
from weft.errors import ConfigError
from weft.report.console import output_console
from weft.spec import JobSpec, RunSpec, load_run

if TYPE_CHECKING:
    from weft.cost.analytic import AnalyticCost
    from weft.cost.hardware import Hardware
    from weft.cost.profile import Profile
    from weft.cost.profiled import ProfiledCost
    from weft.cost.shape import ModelShape
    from weft.data.dataset import JobData
    from weft.simulate.forecast import Forecast, JobOutline

PLANNED_STEPS = 32
"""Global batches of each job that are planned; the rest is taken to go on likewise."""


def plan(
    jobs_file: Annotated[Path, typer.Argument(parser=user_path, metavar="PATH", help="The jobs file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change: capacity=8192")] = None,
    device: Annotated[
        str, typer.Option(help="Kind of device to plan for: cpu, h200, h100, a100-80, … Default: what is here.")
    ] = "auto",
    stages: Annotated[int, typer.Option(help="Stages of a pipeline over so many devices.", min=1)] = 1,
    layout: Annotated[
        str | None,
        typer.Option(metavar="LAYOUT", help="Say what `weft train --layout` of it would do here: auto, stages:2, …"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Global batches of each job to plan.", min=1)] = PLANNED_STEPS,
    profile: Annotated[
        Path | None,
        typer.Option(help="Plan with what `weft profile` measured, from this file, instead of the hardware table."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what will train with what, how full, how long and in how much memory.

    `weft plan deploy` plans the replicas of a whole cluster.
    """
    from weft.cost.profile import load_profile
    from weft.cost.rows import capacities
    from weft.plan.pack import planner_named
    from weft.simulate.forecast import forecast
    from weft.simulate.timeline import gantt

    spec = load_run(jobs_file, overrides or ())
    console = output_console()
    told: tuple[str, ...] = ()
    if layout is not None:
        told, stages = _layout(spec, layout, stages, jobs_file.parent)
    with Console(stderr=True).status("reading the data and planning"):
        known = None if profile is None else load_profile(profile)
        hardware = _hardware(spec, device if known is None else _device_of(known, device, profile))
        jobs = _outlines(spec, jobs_file.parent, steps, is_fused=_is_fused(spec, hardware))
        for capacity in capacities(spec.capacity, hardware.name, spec.longest):
            cost = _cost(spec, hardware, capacity, stages, jobs)
            measured = None if known is None else _measured(known, cost, profile)
            cost, measured = _balanced(cost, measured, capacity)
            found = forecast(jobs, capacity, cost, planner_named(spec.planner), measured)
            if found.fits:
                break
    if as_json:
        typer.echo(json.dumps(found.to_json() | ({"layout": told} if told else {})))
        return
    for line in told:
        console.print(f"layout    {line}", markup=False, highlight=False, soft_wrap=True)
    _show(found, console, is_measured=measured is not None)
    width = max(20, min(100, console.width - 12))
    console.print(gantt(found.timeline, width), markup=False, highlight=False)
    console.print("▒ forward  █ backward or both  | step  · idle", style="dim")


def _layout(spec: RunSpec, layout: str, stages: int, base_dir: Path) -> tuple[tuple[str, ...], int]:
    """What is said of a layout here, and the stages of its replica, of which the rest of the plan tells."""
    from weft.cli.auto_layout import predicted_here, with_layout
    from weft.cli.layout_options import LayoutOptions

    if stages > 1:
        raise ConfigError("says how many stages there are; leave --stages out, or --layout.", where="--layout")
    options, told = LayoutOptions(layout), tuple[str, ...]()
    if options.is_auto:
        options, told, _ = with_layout(spec, options, base_dir)
    options.check(spec, ())
    told = told or predicted_here(spec, layout, base_dir)
    replicas = () if options.stages is None else options.stages.replica_sizes
    more = ("what follows is one of its replicas with all jobs",) if len(replicas) > 1 else ()
    return (*told, *options.notes(spec), *more), max(replicas, default=1)


def _is_fused(spec: RunSpec, hardware: Hardware) -> bool:
    """Whether the run would take the fast path there, as far as the model's configuration tells."""
    from weft.backbone.load import load_config
    from weft.backbone.source import find_source
    from weft.families.registry import why_unfit

    if spec.kernels != "auto":
        return spec.kernels == "fused"
    is_slow = hardware.name == "cpu" or spec.dtype == "float32"
    return not is_slow and why_unfit(load_config(find_source(spec.base_model))) is None


def _outlines(spec: RunSpec, base_dir: Path, num_planned: int, *, is_fused: bool) -> list[JobOutline]:
    from weft.backbone.load import load_config
    from weft.backbone.source import find_source, load_tokenizer
    from weft.data.load import load_job_data

    tokenizer = load_tokenizer(spec.base_model)
    vocabulary = load_config(find_source(spec.base_model)).get("vocab_size", 0)
    return [
        replace(
            _outline(job, load_job_data(job, tokenizer, base_dir), num_planned, is_fused=is_fused),
            # New tokens have a row on either side, unless these are tied.
            num_own_rows=job.adapter.own_rows.count(vocabulary) + 2 * len(job.adapter.new_tokens),
        )
        for job in spec.jobs
    ]


def _outline(job: JobSpec, data: JobData, num_planned: int, *, is_fused: bool) -> JobOutline:
    from weft.adapters.methods import cost_ranks, has_kernels
    from weft.cost.job_state import job_state_bytes
    from weft.data.global_batch import GlobalBatches
    from weft.data.order import BatchSchedule
    from weft.plan.types import Batch, JobQueue
    from weft.simulate.forecast import JobOutline

    order = BatchSchedule.of(job, *data.train.sizes)
    ahead, planned = GlobalBatches(data.train, order), min(order.num_steps, num_planned)
    batches = tuple(Batch(step, 0, tuple(ahead.lengths(step)), ahead.groups(step)) for step in range(planned))
    # As `Backbone.lane` says it: a method without kernels runs apart from those that have them.
    lane = "reference" if is_fused and not has_kernels(job.adapter) else ""
    queue = JobQueue(job.name, batches, planned == order.num_steps, job.priority, lane=lane)
    return JobOutline(
        queue=queue,
        num_steps=order.num_steps,
        num_tokens=order.num_tokens(data.train.group_tokens),
        rank=cost_ranks(job.adapter).widest,
        forward_tokens=data.forward_tokens(order, job.eval_steps),
        state_bytes=job_state_bytes(job),
    )


def _hardware(spec: RunSpec, device: str) -> Hardware:
    """What is planned for: a device by name, or where the run would train here."""
    from weft.cost.hardware import find_hardware

    if device == "auto":
        device = "cpu" if spec.device == "cpu" else _here()
    return find_hardware(device)


def _cost(spec: RunSpec, hardware: Hardware, capacity: int, stages: int, jobs: list[JobOutline]) -> AnalyticCost:
    from weft.backbone.load import load_config
    from weft.backbone.source import find_source
    from weft.cost.analytic import AnalyticCost
    from weft.cost.rows import CPU_ROW_TILE, gpu_row_tile
    from weft.cost.shape import ModelShape

    shape = ModelShape.from_config(load_config(find_source(spec.base_model)), spec.base_model)
    if stages > shape.num_layers:
        raise ConfigError(f"got {stages}; {spec.base_model} has {shape.num_layers} layers.", where="--stages")
    tile = CPU_ROW_TILE if hardware.name == "cpu" else gpu_row_tile(capacity)
    return AnalyticCost(
        shape,
        hardware,
        stages,
        quantize=spec.quantize,
        recompute=spec.recompute,
        rank=max(job.rank for job in jobs),
        num_jobs=len(jobs),
        row_tile=tile,
    )


def _device_of(found: Profile, device: str, path: Path | None) -> str:
    """The device to plan for: that of the profile, which another may not contradict."""
    from weft.cost.hardware import find_hardware

    if device == "auto":
        return found.setup.device
    try:
        own = find_hardware(found.setup.device).name
    except ConfigError:
        return device
    if find_hardware(device).name != own:
        raise ConfigError(f"is of {found.setup.device}; --device says {device}.", where=f"--profile {path}")
    return device


def _measured(found: Profile, cost: AnalyticCost, path: Path | None) -> ProfiledCost:
    """The cost model of a profile, which must be of the same backbone, stored and run in the same way."""
    from weft.cost.profiled import ProfiledCost

    check_profile(found, cost.shape, cost.quantize, cost.recompute, path)
    return ProfiledCost(found, cost.num_stages, cost.rank, cost.num_jobs)


def check_profile(found: Profile, shape: ModelShape, quantize: str, recompute: str, path: Path | None) -> None:
    """Refuses a profile of another backbone, or of one that is stored or run in another way."""
    setup = found.setup
    where = f"--profile {path}"
    if (setup.hidden, setup.num_layers, setup.head_weights) != (shape.hidden, shape.num_layers, shape.head_weights):
        raise ConfigError(
            f"is of {setup.model}, {setup.num_layers} layers of {setup.hidden} and a head of {setup.head_weights:,}; "
            f"{shape.name} has {shape.num_layers} of {shape.hidden} and {shape.head_weights:,}.",
            where=where,
        )
    for name, asked in (("quantize", quantize), ("recompute", recompute)):
        if getattr(setup, name) != asked:
            raise ConfigError(f"was measured with {name} {getattr(setup, name)}; this run has {asked}.", where=where)


def _balanced(
    cost: AnalyticCost, measured: ProfiledCost | None, capacity: int
) -> tuple[AnalyticCost, ProfiledCost | None]:
    """The same with layers shared out so that the slowest stage, head included, is as fast as can be."""
    from weft.plan.pipeline.split import layer_seconds, split_layers

    if cost.num_stages == 1:
        return cost, measured
    num_layers = cost.shape.num_layers
    layers = replace(cost if measured is None else measured, num_stages=num_layers)
    split = split_layers(layer_seconds(layers, num_layers, [capacity]), cost.num_stages)
    return replace(cost, split=split), None if measured is None else replace(measured, split=split)


def _here() -> str:
    """The kind of this machine's device, in the words of the hardware table."""
    from weft.kernels.device import default_device, device_name

    return device_name(default_device())


def _show(found: Forecast, console: Console, *, is_measured: bool) -> None:
    from weft.report.readable import NameCell

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("job", "group", "steps", "tokens", "rank"):
        table.add_column(name, justify="left" if name == "job" else "right", no_wrap=name != "job")
    for job in found.jobs:
        name = job.queue.job
        steps, tokens = f"{job.num_steps:,}", f"{job.num_tokens:,}"
        table.add_row(NameCell(name), str(found.group_of(name)), steps, tokens, str(job.rank))
    console.print(table)
    gib = 2**30
    order = "every job in its own order" if found.keeps_order else "samples reordered within global batches"
    memory = ", ".join(f"{size / gib:,.2f}" for size in found.stage_bytes)
    stages = f" with {', '.join(map(str, found.stage_layers))} layers" if found.num_stages > 1 else ""
    source = "from a profile" if is_measured else "from the hardware table"
    lines = [
        f"planned   {found.planned_tokens:,} tokens in {found.num_microbatches:,} microbatches of up to "
        f"{found.capacity:,} (at least {found.fewest_microbatches:,}), on average {found.fill:.0%} of that; {order}",
        f"schedule  {found.schedule} on {found.num_stages} {found.device}{stages}, bubbles {found.bubble_ratio:.1%}",
        f"speed     about {found.tokens_per_s:,.0f} tokens/s, {duration(found.round_s)} a step; the whole run of "
        f"{found.total_tokens:,} tokens{' with its evaluations and references' if found.eval_s else ''} about "
        f"{duration(found.total_s)} (predicted {source}, not measured)",
        f"memory    {memory} GiB of {found.device_bytes / gib:,.1f}"
        + ("" if found.fits else ": does not fit")
        + f"; microbatches of up to {found.largest_capacity:,} tokens would fit",
    ]
    if found.own_rows_bytes:
        owners = ", ".join(f"{job.queue.job} {job.num_own_rows:,}" for job in found.jobs if job.num_own_rows)
        size = f"{found.own_rows_bytes / gib:,.2f} GiB of that"
        lines.append(f"own rows  {size}, with gradients and optimizer, for rows of embedding and head: {owners}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time as people read it."""
    if seconds < 1:
        return f"{seconds * 1e3:,.3g} ms"
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
