"""`--layout`: chooses one over the devices of a machine, or says what a named one is predicted to do; of the model only
its configuration and tokenizer are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.cli.layout_options import WHERE, LayoutOptions
from weft.data.dataset import Dataset
from weft.data.load import load_job_data
from weft.data.order import BatchSchedule
from weft.errors import ConfigError, PlanError, WeftError
from weft.kernels.device import device_name, gpus, is_cpu, total_bytes
from weft.methods.registry import cost_ranks
from weft.model.load import choose_device, load_config
from weft.model.source import find_source, load_tokenizer
from weft.plan.choose_layout import LayoutChoice, LayoutJob, LayoutOption, choose_layout, price_layout
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.rows import capacities
from weft.plan.cost.shape import ModelShape
from weft.plan.layout import parse_layout
from weft.plan.replan.devices import DeviceForecaster
from weft.spec import JobSpec, RunSpec
from weft.spec.run import memory_fraction
from weft.wording import counted


class Machine(NamedTuple):
    """Devices of one kind, over which a run may lie."""

    hardware: Hardware
    """With the memory that each device has."""
    num_devices: int | None
    """None where nobody said."""
    is_here: bool = True

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are cores."""
        return self.hardware.name == "cpu"

    @property
    def elsewhere(self) -> Hardware | None:
        """Its devices, if they are not those of this machine."""
        return None if self.is_here else self.hardware


class AutoLayout(NamedTuple):
    """What auto stands for here."""

    options: LayoutOptions
    lines: tuple[str, ...]
    """Why it is that one."""
    may_change: bool
    """Whether it may be another one when jobs come and go."""
    predicted: LayoutOption | None = None
    """None where there was no choice."""


class NamedLayout(NamedTuple):
    """What a layout that was named is predicted to need and to gain."""

    predicted: LayoutOption
    memory_bytes: int
    """Of each of its devices."""
    lines: tuple[str, ...]


def machine_here(spec: RunSpec) -> Machine:
    """The cores of this machine, each with its part of the memory, or its GPUs; ConfigError for unknown ones."""
    if is_cpu(choose_device(spec.backbone)):
        cores = os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cores
        return Machine(replace(find_hardware("cpu"), memory_bytes=memory), cores)
    names = sorted({device_name(gpu) for gpu in gpus()})
    if len(names) > 1:
        raise ConfigError(
            f"this machine has unlike GPUs ({', '.join(names)}); say a layout and --devices.", where=WHERE
        )
    try:
        table = find_hardware(names[0])
    except ConfigError:
        raise ConfigError(f"nothing is known of {names[0]}; say a layout, such as spread:2.", where=WHERE) from None
    memory = min(total_bytes(gpu) for gpu in gpus())
    if spec.memory_limit is not None:
        memory = int(memory * memory_fraction(spec.memory_limit, memory))
    return Machine(replace(table, memory_bytes=memory), len(gpus()))


def machine_of(spec: RunSpec, device: str, num_devices: int | None) -> Machine:
    """So many devices of a kind, by the hardware table; `auto` is this machine, as is its own kind without a number."""
    if device == "auto" and num_devices is None:
        return machine_here(spec)
    here = None
    with suppress(ConfigError):
        here = machine_here(spec)
    if device == "auto":
        if here is None:
            raise ConfigError("nothing is known of the devices here; say --device too.", where="--gpus")
        return Machine(here.hardware, num_devices, is_here=False)
    hardware = find_hardware(device)
    if num_devices is None and here is not None and here.hardware.name == hardware.name:
        return here
    return Machine(hardware, num_devices, is_here=False)


def with_layout(
    spec: RunSpec,
    asked: LayoutOptions,
    base_dir: Path,
    machine: Machine | None = None,
    check_more: Callable[[LayoutOptions], None] | None = None,
) -> AutoLayout:
    """What was asked for with a layout in the place of auto: the choice among the devices of a machine, or of this.

    `check_more`: raises what else keeps a layout from being taken.
    """
    machine = machine or machine_here(spec)
    choice = _choice(spec, _jobs(spec, _train_data(spec, base_dir)), machine)
    # Whether a GPU's memory is free for other replicas once its own are closed, nobody has tried; and a schedule is for
    # stages, which others might not have.
    may_change = machine.is_cpu and asked.schedule is None
    refused: dict[str, list[str]] = {}
    for option in choice.ranked:
        if option.layout.is_one_device and asked.schedule is not None:
            continue
        options = replace(asked, layout=str(option.layout))
        try:
            options.check(spec, (), machine.elsewhere)
            if check_more is not None:
                check_more(options)
        except WeftError as error:
            refused.setdefault(str(error), []).append(options.layout or "")
            continue
        if option.layout.is_one_device:
            options = LayoutOptions()
        lines = (*replace(choice, chosen=option).lines, *_why_not(refused))
        return AutoLayout(options, lines, may_change, option)
    why = (
        "one device, because no other can be" if asked.schedule is None else "one device, because none in stages can be"
    )
    return AutoLayout(LayoutOptions(), (why, *_why_not(refused)), may_change)


def _why_not(refused: dict[str, list[str]]) -> list[str]:
    return [f"{', '.join(layouts)} cannot be: {why}" for why, layouts in refused.items()]


def predicted_on(spec: RunSpec, layout: str, base_dir: Path, machine: Machine) -> NamedLayout:
    """What a layout that was named is predicted to need and to gain on devices of this kind."""
    wanted = parse_layout(layout, where=WHERE)
    num, there = wanted.num_devices, machine.num_devices or wanted.num_devices
    # Processes that outnumber the cores share their memory too.
    memory = machine.hardware.memory_bytes * there // max(there, num)
    if num > there and not machine.is_here:
        raise ConfigError(f"{layout} has {counted(num, 'device')}, and --gpus says {there}.", where=WHERE)
    jobs = _jobs(spec, _train_data(spec, base_dir))
    for capacity in capacities(spec.capacity, machine.hardware.name, spec.longest):
        option = price_layout(
            _cost(spec, [job.rank for job in jobs], machine.hardware, capacity), jobs, capacity, wanted
        )
        if option.device_bytes <= memory:
            break
    line = f"{option.told(memory, layout)} (predicted)"
    cores = counted(there, "core")
    shared = f"{num} processes would share the {cores} here: that is the speed of {num} cores, not of these"
    return NamedLayout(option, memory, (line, shared) if num > there else (line,))


def _choice(spec: RunSpec, jobs: Sequence[LayoutJob], machine: Machine) -> LayoutChoice:
    """At the largest capacity at which a layout fits."""
    if machine.num_devices is None:
        found = f"auto chooses over several devices; say how many {machine.hardware.name} there are with --gpus N."
        raise ConfigError(found, where=WHERE)
    sizes = capacities(spec.capacity, machine.hardware.name, spec.longest)
    for capacity in sizes:
        cost = _cost(spec, [job.rank for job in jobs], machine.hardware, capacity)
        try:
            return choose_layout(cost, jobs, capacity, machine.num_devices, machine.hardware.memory_bytes)
        except PlanError:
            if capacity == sizes[-1]:
                raise
    raise AssertionError("the last capacity returns or raises")


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
    """By the data, with those that its reference is asked, or where there is none by max_length."""
    if train is None:
        return job.batch_size * job.max_length
    order = BatchSchedule.of(job, *train.sizes)
    # What a reference is asked runs forward alone, which takes about half as long.
    asked = train.reference_tokens(order.num_tokens) // 2
    return max(1, -(-(order.num_tokens(train.group_tokens) + asked) // order.num_steps))


def forecaster_here(spec: RunSpec) -> DeviceForecaster | None:
    """What the layout is chosen anew by when jobs come and go; None where there is no other than one device."""
    try:
        LayoutOptions("stages:2").check(spec, ())
    except WeftError:
        return None
    machine = machine_here(spec)
    capacity = capacities(spec.capacity, machine.hardware.name, spec.longest)[0]
    cores = machine.num_devices or 1
    forecaster = DeviceForecaster(
        lambda jobs: _cost(spec, [job.rank for job in jobs], machine.hardware, capacity),
        capacity,
        cores,
        machine.hardware.memory_bytes,
    )
    return forecaster if cores > 1 else None


def _cost(spec: RunSpec, ranks: Sequence[int], hardware: Hardware, capacity: int) -> AnalyticCost:
    """What one device is taken to cost, with adapters of these ranks."""
    shape = ModelShape.from_config(load_config(find_source(spec.base_model)), spec.base_model)
    return BackboneSetup(shape, tuple(ranks), spec.quantize, spec.recompute).cost(hardware, capacity=capacity)
