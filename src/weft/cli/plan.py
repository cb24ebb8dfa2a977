"""`weft plan`: what will train with what, how full, how long and in how much memory; nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.user_path import user_path
from weft.errors import ConfigError
from weft.report.console import output_console
from weft.spec import JobSpec, RunSpec, load_run
from weft.wording import counted, size

if TYPE_CHECKING:
    from weft.cli.layout_options import LayoutOptions
    from weft.data.dataset import JobData
    from weft.parallel.stages.load_stages import StageLayout
    from weft.plan.cost.analytic import AnalyticCost
    from weft.plan.cost.hardware import Hardware
    from weft.plan.cost.profile import Profile
    from weft.plan.cost.profiled import ProfiledCost
    from weft.plan.cost.shape import ModelShape
    from weft.plan.simulate.forecast import Forecast, JobOutline

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
        typer.Option(
            metavar="LAYOUT", help="Plan what `weft train --layout` of it would do: auto, stages:2, spread:2, …"
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="With --layout: over so many devices. Default: those that are here.", min=1)
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
    from weft.plan.cost.profile import load_profile
    from weft.plan.cost.rows import capacities
    from weft.plan.pack import planner_named
    from weft.plan.simulate.forecast import forecast
    from weft.plan.simulate.timeline import gantt

    spec = load_run(jobs_file, overrides or ())
    console = output_console()
    if layout is None and gpus is not None:
        raise ConfigError("is for --layout; say one, such as auto, or use --stages N.", where="--gpus")
    if layout is not None and (stages > 1 or profile is not None):
        flag, why = ("--stages", "says how many there are") if stages > 1 else ("--profile", "knows one device alone")
        raise ConfigError(f"{flag} {why}; leave {flag} out, or --layout.", where="--layout")
    lying = None if layout is None else _layout(spec, layout, device, gpus, jobs_file.parent)
    with Console(stderr=True).status("reading the data and planning"):
        known = None if profile is None else load_profile(profile)
        if lying is None:
            hardware = _hardware(spec, device if known is None else _device_of(known, device, profile))
        else:
            hardware = lying.hardware
        jobs = _outlines(spec, jobs_file.parent, steps, is_fused=_is_fused(spec, hardware))
        for capacity in capacities(spec.capacity, hardware.name, spec.longest):
            cost = _cost(spec, hardware, capacity, stages, jobs)
            measured = None if known is None else _measured(known, cost, profile)
            if lying is None:
                cost, measured = _balanced(cost, measured, capacity)
                found = forecast(jobs, capacity, cost, planner_named(spec.planner), measured)
            else:
                found = _forecast_layout(spec, lying.options.stages, cost, capacity, jobs)
            if found.fits:
                break
    if as_json:
        typer.echo(json.dumps(found.to_json() | ({} if lying is None else lying.to_json())))
        return
    if lying is not None:
        said = [*(f"layout    {line}" for line in lying.lines), *(f"note      {note}" for note in lying.notes)]
        console.print("\n".join(said), markup=False, highlight=False, soft_wrap=True)
    _show(found, console, () if lying is None else lying.alone, is_measured=measured is not None)
    width = max(20, min(100, console.width - 12))
    console.print(gantt(found.timeline, width, names=found.stage_names), markup=False, highlight=False)
    console.print("▒ forward  █ backward or both  | step  · idle", style="dim")


class _PlannedLayout(NamedTuple):
    """A layout, the devices that it is planned for, and what is said of it."""

    options: LayoutOptions
    hardware: Hardware
    lines: tuple[str, ...]
    """What is predicted of it, and of others where it was chosen."""
    notes: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    """Why no two microbatches of it run side by side, if that was no question."""

    def to_json(self) -> dict[str, Any]:
        """What is said of it; why no microbatches run side by side is a note here."""
        return {"layout": self.lines, "notes": (*self.notes, *self.alone)}


def _layout(spec: RunSpec, layout: str, device: str, gpus: int | None, base_dir: Path) -> _PlannedLayout:
    """The layout that was named or is chosen, on the machine that was named or on this one."""
    from weft.cli.auto_layout import machine_of, predicted_on, with_layout
    from weft.cli.layout_options import LayoutOptions
    from weft.parallel.load_staged import layout_notes, pair_notes

    options, machine = LayoutOptions(layout), machine_of(spec, device, gpus)
    hardware = machine.hardware
    if options.is_auto:
        options, lines, *_ = with_layout(spec, options, base_dir, machine)
    else:
        options.check(spec, (), machine.elsewhere)
        _, memory, lines = predicted_on(spec, layout, base_dir, machine)
        hardware = replace(hardware, memory_bytes=memory)
    if options.stages is None:
        return _PlannedLayout(options, hardware, lines)
    notes, alone = (told(spec, options.stages, machine.elsewhere) for told in (layout_notes, pair_notes))
    return _PlannedLayout(options, hardware, lines, notes, alone)


def _forecast_layout(
    spec: RunSpec, layout: StageLayout | None, cost: AnalyticCost, capacity: int, jobs: list[JobOutline]
) -> Forecast:
    """The forecast of a run in a layout; `cost`: of one device."""
    from weft.parallel.stages.load_stages import why_no_pairs
    from weft.plan.pack import planner_named
    from weft.plan.simulate.choose import pipeline_planner
    from weft.plan.simulate.forecast import forecast
    from weft.plan.simulate.replica_forecast import forecast_replicas

    sizes, tensor = ((1,), 1) if layout is None else (layout.replica_sizes, layout.tensor)
    costs = [_balanced(replace(cost, num_stages=n, tensor_parallel=tensor), None, capacity)[0] for n in sizes]
    in_pairs = (
        layout is not None and tensor > 1 and why_no_pairs(spec.backbone, spec.planner, layout, cost.hardware) is None
    )
    if layout is None or (sizes == (1,) and not in_pairs):
        return forecast(jobs, capacity, costs[0], planner_named(spec.planner))
    if len(sizes) == 1:
        return forecast(jobs, capacity, costs[0], pipeline_planner(spec.planner, costs[0], in_pairs=in_pairs))
    return forecast_replicas(jobs, capacity, costs, shards=layout.shards, planner=spec.planner)


def _is_fused(spec: RunSpec, hardware: Hardware) -> bool:
    """Whether the run would take the fast path there, as far as the model's configuration tells."""
    from weft.model.load import load_config
    from weft.model.source import find_source
    from weft.plan.families.registry import why_unfit

    if spec.kernels != "auto":
        return spec.kernels == "fused"
    is_slow = hardware.name == "cpu" or spec.dtype == "float32"
    return not is_slow and why_unfit(load_config(find_source(spec.base_model))) is None


def _outlines(spec: RunSpec, base_dir: Path, num_planned: int, *, is_fused: bool) -> list[JobOutline]:
    from weft.data.load import load_job_data
    from weft.model.load import load_config
    from weft.model.source import find_source, load_tokenizer

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
    from weft.data.global_batch import GlobalBatches
    from weft.data.order import BatchSchedule
    from weft.methods.registry import cost_ranks, has_kernels
    from weft.plan.cost.job_state import job_state_bytes
    from weft.plan.simulate.forecast import JobOutline
    from weft.plan.types import Batch, JobQueue

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
        cost_rank=cost_ranks(job.adapter).widest,
        rank=job.adapter.rank,
        forward_tokens=data.forward_tokens(order, job.eval_steps),
        state_bytes=job_state_bytes(job),
        is_free=job.sums == "free",
    )


def _hardware(spec: RunSpec, device: str) -> Hardware:
    """What is planned for: a device by name, or where the run would train here."""
    from weft.plan.cost.hardware import find_hardware

    if device == "auto":
        device = "cpu" if spec.device == "cpu" else _here()
    return find_hardware(device)


def _cost(spec: RunSpec, hardware: Hardware, capacity: int, stages: int, jobs: list[JobOutline]) -> AnalyticCost:
    from weft.model.load import load_config
    from weft.model.source import find_source
    from weft.plan.cost.analytic import BackboneSetup
    from weft.plan.cost.shape import ModelShape

    shape = ModelShape.from_config(load_config(find_source(spec.base_model)), spec.base_model)
    if stages > shape.num_layers:
        raise ConfigError(f"got {stages}; {spec.base_model} has {shape.num_layers} layers.", where="--stages")
    setup = BackboneSetup(shape, tuple(job.cost_rank for job in jobs), spec.quantize, spec.recompute)
    return setup.cost(hardware, stages, capacity=capacity)


def _device_of(found: Profile, device: str, path: Path | None) -> str:
    """The device to plan for: that of the profile, which another may not contradict."""
    from weft.plan.cost.hardware import find_hardware

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
    from weft.plan.cost.profiled import ProfiledCost

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


def _show(found: Forecast, console: Console, alone: Sequence[str], *, is_measured: bool) -> None:
    """Prints a forecast; `alone`: why no two microbatches run side by side, if that was no question."""
    from weft.engine.events import MicrobatchesPaired
    from weft.report.readable import NOTHING, NameCell

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("job", "group", "steps", "tokens", "rank"):
        table.add_column(name, justify="left" if name == "job" else "right", no_wrap=name != "job")
    for job in found.jobs:
        name = job.queue.job
        steps, tokens = f"{job.num_steps:,}", f"{job.num_tokens:,}"
        rank = NOTHING if job.rank is None else str(job.rank)
        table.add_row(NameCell(name), str(found.group_of(name)), steps, tokens, rank)
    console.print(table)
    order = "every job in its own order" if found.keeps_order else "samples reordered within global batches"
    memory = ", ".join(size(num_bytes) for num_bytes in found.stage_bytes)
    shared = f", {found.tensor_parallel} to a stage," if found.num_devices > found.num_stages > 1 else ""
    stages = f"{shared} with {', '.join(map(str, found.stage_layers))} layers" if found.num_stages > 1 else ""
    source = "from a profile" if is_measured else "from the hardware table"
    lines = [
        f"planned   {found.planned_tokens:,} tokens in {counted(found.num_microbatches, 'microbatch')} of up to "
        f"{found.capacity:,} (at least {found.fewest_microbatches:,}), on average {found.fill:.0%} of that; {order}",
        f"schedule  {found.schedule} on {found.num_devices} {found.device}{stages}, bubbles {found.bubble_ratio:.1%}",
        f"speed     about {found.tokens_per_s:,.0f} tokens/s, {duration(found.round_s)} a step; the whole run of "
        f"{found.total_tokens:,} tokens{' with its evaluations and references' if found.eval_s else ''} about "
        f"{duration(found.total_s)} (predicted {source}, not measured)",
        f"memory    {memory} of {size(found.device_bytes)}{' a device' * (found.num_devices > 1)} with the planned "
        "microbatches"
        + ("" if found.fits else ": does not fit")
        + f"; those of up to {found.largest_capacity:,} tokens would fit",
    ]
    decided = found.pairs and MicrobatchesPaired(found.pairs.num_pairs, found.pairs.gain, found.groups, 0)
    lines[2:2] = [f"pairs     {line}" for line in ([decided.text] if decided else alone)]
    if found.own_rows_bytes:
        owners = ", ".join(f"{job.queue.job} {job.num_own_rows:,}" for job in found.jobs if job.num_own_rows)
        lines.append(
            f"own rows  {size(found.own_rows_bytes)} of that, with gradients and optimizer, for rows of embedding and "
            f"head: {owners}"
        )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time as people read it."""
    if seconds < 1:
        return f"{seconds * 1e3:,.3g} ms"
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
