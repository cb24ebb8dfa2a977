"""`--layout auto`: chooses a layout over this machine's devices, before anything of the model but its configuration is
read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from weft.adapters.methods import cost_ranks
from weft.backbone.load import choose_device, load_config
from weft.backbone.source import find_source
from weft.cli.layout_options import WHERE, LayoutOptions
from weft.cost.analytic import AnalyticCost
from weft.cost.hardware import find_hardware
from weft.cost.rows import CPU_ROW_TILE, choose_capacity
from weft.cost.shape import ModelShape
from weft.errors import ConfigError, WeftError
from weft.kernels.device import is_cpu
from weft.plan.choose_layout import LayoutChoice, LayoutJob, choose_layout
from weft.plan.replan.devices import DeviceForecaster
from weft.spec import RunSpec


def with_layout(spec: RunSpec, asked: LayoutOptions) -> tuple[LayoutOptions, tuple[str, ...]]:
    """What was asked for with a layout in the place of auto, and the lines that say why it is that one."""
    choice = layout_here(spec)
    layout = choice.chosen.layout
    if layout.is_one_device:
        return LayoutOptions(), choice.lines
    options = replace(asked, layout=str(layout))
    try:
        options.check(spec, ())
    except WeftError as error:
        return LayoutOptions(), (f"one device, because {layout} cannot be: {error}",)
    return options, choice.lines


def layout_here(spec: RunSpec) -> LayoutChoice:
    """The choice among the cores of this machine, which share its memory; lengths are taken to be max_length."""
    if not is_cpu(choose_device(spec.backbone)):
        raise ConfigError("layouts are chosen for CPUs only so far; say one, or use --replicas auto.", where=WHERE)
    jobs = [
        LayoutJob(job.batch_size * job.max_length, cost_ranks(job.adapter).widest, job.sums == "free")
        for job in spec.jobs
    ]
    cost = _cost(spec, [job.rank for job in jobs])
    return choose_layout(cost, jobs, choose_capacity(spec.capacity, "cpu", spec.longest), *_devices())


def forecaster_here(spec: RunSpec) -> DeviceForecaster | None:
    """What the layout is chosen anew by when jobs come and go; None where there is no other than one device."""
    try:
        LayoutOptions("stages:2").check(spec, ())
    except WeftError:
        return None
    cores, memory = _devices()
    capacity = choose_capacity(spec.capacity, "cpu", spec.longest)
    forecaster = DeviceForecaster(lambda jobs: _cost(spec, [job.rank for job in jobs]), capacity, cores, memory)
    return forecaster if cores > 1 else None


def _cost(spec: RunSpec, ranks: Sequence[int]) -> AnalyticCost:
    """What one core is taken to cost, with adapters of these ranks."""
    return AnalyticCost(
        ModelShape.from_config(load_config(find_source(spec.base_model)), spec.base_model),
        find_hardware("cpu"),
        quantize=spec.quantize,
        recompute=spec.recompute,
        rank=max(ranks),
        num_jobs=len(ranks),
        row_tile=CPU_ROW_TILE,
    )


def _devices() -> tuple[int, int]:
    """The cores of this machine, and the part of its memory that each has."""
    cores = os.cpu_count() or 1
    return cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cores
