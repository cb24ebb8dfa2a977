"""`--layout auto`: chooses a layout over this machine's devices, before anything of the model but its configuration is
read."""

from __future__ import annotations

import os
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
    shape = ModelShape.from_config(load_config(find_source(spec.base_model)), spec.base_model)
    jobs = [
        LayoutJob(job.batch_size * job.max_length, cost_ranks(job.adapter).widest, job.sums == "free")
        for job in spec.jobs
    ]
    cost = AnalyticCost(
        shape,
        find_hardware("cpu"),
        quantize=spec.quantize,
        recompute=spec.recompute,
        rank=max(job.rank for job in jobs),
        num_jobs=len(jobs),
        row_tile=CPU_ROW_TILE,
    )
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return choose_layout(cost, jobs, choose_capacity(spec.capacity, "cpu", spec.longest), cores, memory // cores)
