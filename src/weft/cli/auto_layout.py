"""`--layout`: chooses one over this machine's devices, or says what a named one is predicted to do; of the model only
its configuration and tokenizer are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.adapters.methods import cost_ranks
from weft.backbone.load import choose_device, load_config
from weft.backbone.source import find_source, load_tokenizer
from weft.cli.layout_options import WHERE, LayoutOptions
from weft.cost.analytic import AnalyticCost
from weft.cost.hardware import find_hardware
from weft.cost.rows import CPU_ROW_TILE, choose_capacity
from weft.cost.shape import ModelShape
from weft.data.dataset import Dataset
from weft.data.load import load_job_data
from weft.data.order import BatchSchedule
from weft.errors import ConfigError, WeftError
from weft.kernels.device import is_cpu
from weft.plan.choose_layout import LayoutJob, choose_layout, price_layout
from weft.plan.layout import parse_layout
from weft.plan.replan.devices import DeviceForecaster
from weft.spec import JobSpec, RunSpec


class AutoLayout(NamedTuple):
    """What auto stands for here."""

    options: LayoutOptions
    lines: tuple[str, ...]
    """Why it is that one."""
    may_change: bool
    """Whether it may be another one when jobs come and go."""


def with_layout(spec: RunSpec, asked: LayoutOptions, base_dir: Path) -> AutoLayout:
    """What was asked for with a layout in the place of auto: the choice among the cores of this machine."""
    if not is_cpu(choose_device(spec.backbone)):
        raise ConfigError("layouts are chosen for CPUs only so far; say one, or use --replicas auto.", where=WHERE)
    data = _train_data(spec, base_dir)
    for job, own in zip(spec.jobs, data, strict=True):
        if own is not None and own.reads_reference:
            why = f"one device, because job {job.name} compares with a reference, which stages do not run"
            return AutoLayout(LayoutOptions(), (why,), may_change=False)
    jobs = _jobs(spec, data)
    cost = _cost(spec, [job.rank for job in jobs])
    choice = choose_layout(cost, jobs, choose_capacity(spec.capacity, "cpu", spec.longest), *_devices())
    layout = choice.chosen.layout
    if layout.is_one_device:
        return AutoLayout(LayoutOptions(), choice.lines, may_change=True)
    options = replace(asked, layout=str(layout))
    try:
        options.check(spec, ())
    except WeftError as error:
        why = f"one device, because {layout} cannot be: {error}"
        return AutoLayout(LayoutOptions(), (why,), may_change=True)
    return AutoLayout(options, choice.lines, may_change=True)


def predicted_here(spec: RunSpec, layout: str, base_dir: Path) -> tuple[str, ...]:
    """What a layout that was named is predicted to need and to gain here; nothing is said of GPUs."""
    if not is_cpu(choose_device(spec.backbone)):
        return ()
    jobs, (cores, memory) = _jobs(spec, _train_data(spec, base_dir)), _devices()
    wanted = parse_layout(layout, where=WHERE)
    capacity = choose_capacity(spec.capacity, "cpu", spec.longest)
    option = price_layout(_cost(spec, [job.rank for job in jobs]), jobs, capacity, wanted)
    num = wanted.num_devices
    line = f"{option.told(memory * cores // max(cores, num))} (predicted)"
    if num <= cores:
        return (line,)
    return line, f"{num} processes would share the {cores} cores here: that is the speed of {num} cores, not of these"


def _jobs(spec: RunSpec, data: Sequence[Dataset | None]) -> list[LayoutJob]:
    """The jobs with the tokens that their global batches have on average."""
    return [
        LayoutJob(_batch_tokens(job, own), cost_ranks(job.adapter).widest, job.sums == "free")
        for job, own in zip(spec.jobs, data, strict=True)
    ]


def _train_data(spec: RunSpec, base_dir: Path) -> list[Dataset | None]:
    """Of every job, prepared here and kept for the run; None where it cannot be, which the run will say."""
    tokenizer, found = load_tokenizer(spec.base_model), list[Dataset | None]()
    for job in spec.jobs:
        try:
            found.append(load_job_data(job, tokenizer, base_dir).train)
        except WeftError:
            found.append(None)
    return found


def _batch_tokens(job: JobSpec, train: Dataset | None) -> int:
    """By the data, or where there is none by max_length."""
    if train is None:
        return job.batch_size * job.max_length
    order = BatchSchedule.of(job, *train.sizes)
    return max(1, -(-order.num_tokens(train.group_tokens) // order.num_steps))


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
