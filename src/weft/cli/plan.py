"""`weft plan`: what will train with what, how full, how long and in how much memory; nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from weft.cli.options import path_argument, path_option
from weft.errors import ConfigError, counted, rough_time, size
from weft.plan.layout import Layout
from weft.report.readable import output_console, print_line
from weft.spec import RunSpec, load_run

if TYPE_CHECKING:
    from weft.cli.layout_options import LayoutOptions
    from weft.model.resolve import ResolvedModel
    from weft.plan.cost.analytic import AnalyticCost
    from weft.plan.cost.hardware import Hardware
    from weft.plan.cost.profile import Profile, ProfiledCost
    from weft.plan.simulate.forecast import Forecast, JobOutline

PLANNED_STEPS = 32
"""Number of global batches of each job that are planned; all others are assumed to take as long."""


def plan(
    jobs_file: Annotated[Path, path_argument("The jobs file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change: capacity=8192")] = None,
    device: Annotated[
        str, typer.Option(help="Kind of device to plan for: cpu, h200, h100, a100-80, … Default: this machine's.")
    ] = "auto",
    stages: Annotated[int, typer.Option(help="Short for --layout stages:N on N devices.", min=1)] = 1,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT", help="Plan what `weft train --layout` of it would do: auto, stages:2, spread:2, …"
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="With --layout: plan for this many devices. Default: those of this machine.", min=1, max=1024
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Global batches of each job to plan.", min=1)] = PLANNED_STEPS,
    profile: Annotated[
        Path | None,
        path_option("Plan with what `weft profile` measured, from this file, instead of the hardware table."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what will train with what, how full, how long and in how much memory.

    `weft plan deploy` plans the replicas of a whole cluster.
    """
    from weft.kernels.device import default_device, device_name
    from weft.model.resolve import resolve
    from weft.parallel.auto_layout import outlines
    from weft.plan.cost.hardware import find_hardware
    from weft.plan.cost.profile import load_profile
    from weft.plan.cost.shape import capacities
    from weft.plan.families import estimate_note
    from weft.plan.simulate.layout_forecast import forecast_layout
    from weft.plan.simulate.timeline import gantt
    from weft.spec.load import located

    spec = load_run(jobs_file, overrides or ())
    console = output_console()
    if layout is None and gpus is not None:
        raise ConfigError("is for --layout; give one, such as auto, or use --stages N.", where="--gpus")
    if layout is not None and stages > 1:
        raise ConfigError("--stages is short for a layout; leave --stages out, or --layout.", where="--layout")
    spelled: tuple[str, ...] = ()
    if stages > 1:
        layout, gpus = f"stages:{stages}", stages
        spelled = (f"--stages {stages} is another spelling of --layout {layout}.",)
    elif layout is not None and profile is not None:
        raise ConfigError("a profile measures a single device; leave out --profile or --layout.", where="--layout")
    known = None if profile is None else load_profile(profile)
    device = device if known is None else _device_of(known, device, profile)
    if layout is None:
        if device == "auto":
            device = "cpu" if spec.device == "cpu" else device_name(default_device())
        hardware = find_hardware(device)
        model, planned = resolve(spec.backbone, hardware), None
    else:
        with located(jobs_file, overrides or ()):
            model, planned = _layout(spec, layout, device, gpus, jobs_file.parent, spelled)
        hardware = planned.hardware
    with Console(stderr=True).status("reading the data and planning"):
        with located(jobs_file, overrides or ()):
            jobs = outlines(model, spec.jobs, jobs_file.parent, steps)
        measured = None if known is None else _measured(known, model, jobs, profile)
        for capacity in capacities(spec.capacity, hardware.name, spec.longest):
            numbers = [job.cost_rank for job in jobs], [job.num_parameters for job in jobs]
            setup = model.setup(*numbers, [job.adapter for job in spec.jobs])
            cost = setup.cost(hardware, capacity=capacity)
            found = forecast_layout(
                jobs,
                capacity,
                cost,
                Layout() if planned is None else planned.options.chosen,
                planner=spec.planner,
                in_pairs=planned is not None and planned.in_pairs,
                measured=measured,
            )
            if found.fits:
                break
    if as_json:
        typer.echo(json.dumps(found.to_json() | ({} if planned is None else planned.to_json())))
        return
    if planned is not None:
        lines = [*(f"layout    {line}" for line in planned.lines), *(f"note      {note}" for note in planned.notes)]
        print_line(console, "\n".join(lines))
    if (note := estimate_note(model.config)) is not None:
        print_line(console, f"note      {note}")
    _show(found, console, () if planned is None else planned.alone, is_measured=measured is not None)
    for line in _expert_lines(found, cost, is_alone=planned is None):
        print_line(console, line)
    width = max(20, min(100, console.width - 12))
    console.print(gantt(found.timeline, width, names=found.stage_names), markup=False, highlight=False)
    console.print("▒ forward  █ backward or both  | step  · idle", style="dim")


class _PlannedLayout(NamedTuple):
    """A layout, the devices that it is planned for, and its texts."""

    options: LayoutOptions
    hardware: Hardware
    lines: tuple[str, ...]
    """Prediction for the layout, and for the others if it was chosen among several."""
    notes: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    """Reason why no two microbatches run side by side, if that is certain in advance."""
    in_pairs: bool = False
    """True if microbatches may run side by side."""

    def to_json(self) -> dict[str, Any]:
        return {"layout": self.lines, "notes": (*self.notes, *self.alone)}


def _layout(
    spec: RunSpec, layout: str, device: str, gpus: int | None, base_dir: Path, spelled: tuple[str, ...]
) -> tuple[ResolvedModel, _PlannedLayout]:
    from weft.cli.layout_options import LayoutOptions
    from weft.model.resolve import resolve
    from weft.parallel.auto_layout import machine_of, predicted_on
    from weft.parallel.stages.load_stages import layout_notes, pair_notes, why_no_pairs

    options, machine = LayoutOptions(layout), machine_of(spec, device, gpus)
    hardware, model = machine.hardware, resolve(spec.backbone, machine.elsewhere)
    if options.is_auto:
        options, chosen = options.choose(spec, model, base_dir, machine)
        lines = chosen.lines
    else:
        options.check(spec, (), model)
        _, memory, lines = predicted_on(spec, model, layout, base_dir, machine)
        hardware = replace(hardware, memory_bytes=memory)
    stages = options.stages
    if stages is None:
        return model, _PlannedLayout(options, hardware, lines, spelled)
    in_pairs = bool(stages.tensor) and why_no_pairs(model, spec.planner, stages) is None
    notes, alone = layout_notes(spec, model, stages), pair_notes(spec, model, stages)
    return model, _PlannedLayout(options, hardware, lines, (*spelled, *notes), alone, in_pairs)


def _device_of(found: Profile, device: str, path: Path | None) -> str:
    """The profile's device; ConfigError if `device` is another one."""
    from weft.plan.cost.hardware import find_hardware

    if device == "auto":
        return found.setup.device
    try:
        own = find_hardware(found.setup.device).name
    except ConfigError:
        return device
    if find_hardware(device).name != own:
        raise ConfigError(f"is of {found.setup.device}; --device is {device}.", where=f"--profile {path}")
    return device


def _measured(found: Profile, model: ResolvedModel, jobs: Sequence[JobOutline], path: Path | None) -> ProfiledCost:
    """The cost model of a profile, which must be of the same backbone with the same storage and recomputation."""
    from weft.plan.cost.profile import ProfiledCost, check_profile

    check_profile(found, model.shape, model.spec.quantize, model.spec.recompute, f"--profile {path}")
    return ProfiledCost(found, rank=max(job.cost_rank for job in jobs), num_jobs=len(jobs))


def _expert_lines(found: Forecast, cost: AnalyticCost, *, is_alone: bool) -> list[str]:
    """A line for each choice of experts; with the number of such jobs that fit if `is_alone`, on one device."""
    from weft.plan.simulate.forecast import num_that_fit, outline_bytes
    from weft.report.readable import expert_costs

    return expert_costs(
        (
            job.queue.job,
            job.experts,
            job.num_parameters,
            outline_bytes(job, cost),
            num_that_fit(job, found.capacity, cost) if is_alone else None,
        )
        for job in found.jobs
        if job.experts and job.num_parameters
    )


def _show(found: Forecast, console: Console, alone: Sequence[str], *, is_measured: bool) -> None:
    from weft.engine.events import MicrobatchesPaired
    from weft.report.readable import NOTHING, NameCell, plain_table

    table = plain_table("job", "group", "steps", "tokens", "rank", left=("job",))
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
        f"speed     about {found.tokens_per_s:,.0f} tokens/s, {rough_time(found.round_s)} a step; the whole run of "
        f"{found.total_tokens:,} tokens{' with its evaluations and references' if found.eval_s else ''} about "
        f"{rough_time(found.total_s)} (predicted {source}, not measured)",
        f"memory    {memory} of {size(found.device_bytes)}{' a device' * (found.num_devices > 1)} with the planned "
        "microbatches"
        + ("" if found.fits else ": does not fit")
        + f"; those of up to {found.largest_capacity:,} tokens would fit",
    ]
    decided = found.pairs and MicrobatchesPaired(found.pairs.num_pairs, found.pairs.gain, found.groups, 0)
    lines[2:2] = [f"pairs     {line}" for line in ([decided.text] if decided else alone)]
    if found.trained_rows_bytes:
        owners = ", ".join(f"{job.queue.job} {job.num_trained_rows:,}" for job in found.jobs if job.num_trained_rows)
        lines.append(
            f"own rows  {size(found.trained_rows_bytes)} of that, with gradients and optimizer, for rows of embedding "
            f"and head: {owners}"
        )
    print_line(console, "\n".join(lines))
