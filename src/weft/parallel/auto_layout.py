"""Chooses a layout over the devices of a machine, or predicts what a named one does.

Of the model, only its configuration and its tokenizer are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.data.dataset import Dataset
from weft.data.load import load_job_data
from weft.data.order import BatchSchedule
from weft.errors import ConfigError, PlanError, WeftError
from weft.kernels.device import device_name, gpus, is_cpu, total_bytes
from weft.methods.registry import cost_ranks
from weft.model.resolve import ResolvedModel, choose_device
from weft.model.source import load_tokenizer
from weft.parallel.stages.load_stages import WHERE
from weft.plan.choose_layout import LayoutChoice, LayoutJob, LayoutOption, choose_layout, price_layout
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.rows import capacities
from weft.plan.layout import Layout, parse_layout
from weft.plan.replan import RemainingJob
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


class ChosenLayout(NamedTuple):
    """The layout that auto stands for on a machine."""

    layout: Layout
    lines: tuple[str, ...]
    """Why it is that one."""
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


def choose_for(
    spec: RunSpec,
    model: ResolvedModel,
    base_dir: Path,
    machine: Machine,
    check: Callable[[Layout], None],
    *,
    in_stages: bool = False,
) -> ChosenLayout:
    """The fastest layout of a run on a machine that `check` raises nothing for.

    `in_stages`: one device is no answer as long as there is another.
    """
    choice = _choice(spec, model, _jobs(spec, _train_data(spec, model, base_dir)), machine)
    refused: dict[str, list[str]] = {}
    for option in choice.ranked:
        if option.layout.is_one_device and in_stages:
            continue
        try:
            check(option.layout)
        except WeftError as error:
            refused.setdefault(str(error), []).append(str(option.layout))
            continue
        return ChosenLayout(option.layout, (*replace(choice, chosen=option).lines, *_why_not(refused)), option)
    why = "one device, because no other can be" if not in_stages else "one device, because none in stages can be"
    return ChosenLayout(Layout(), (why, *_why_not(refused)))


def _why_not(refused: dict[str, list[str]]) -> list[str]:
    return [f"{', '.join(layouts)} cannot be: {why}" for why, layouts in refused.items()]


def predicted_on(spec: RunSpec, model: ResolvedModel, layout: str, base_dir: Path, machine: Machine) -> NamedLayout:
    """What a layout that was named is predicted to need and to gain on devices of this kind."""
    wanted = parse_layout(layout, where=WHERE)
    num, there = wanted.num_devices, machine.num_devices or wanted.num_devices
    # Processes that outnumber the cores share their memory too.
    memory = machine.hardware.memory_bytes * there // max(there, num)
    if num > there and not machine.is_here:
        raise ConfigError(f"{layout} has {counted(num, 'device')}, and --gpus says {there}.", where=WHERE)
    jobs = _jobs(spec, _train_data(spec, model, base_dir))
    for capacity in capacities(spec.capacity, machine.hardware.name, spec.longest):
        option = price_layout(_cost(model, machine, jobs, capacity), jobs, capacity, wanted)
        if option.device_bytes <= memory:
            break
    line = f"{option.told(memory, layout)} (predicted)"
    cores = counted(there, "core")
    shared = f"{num} processes would share the {cores} here: that is the speed of {num} cores, not of these"
    return NamedLayout(option, memory, (line, shared) if num > there else (line,))


def _choice(spec: RunSpec, model: ResolvedModel, jobs: Sequence[LayoutJob], machine: Machine) -> LayoutChoice:
    """At the largest capacity at which a layout fits."""
    if machine.num_devices is None:
        found = f"auto chooses over several devices; say how many {machine.hardware.name} there are with --gpus N."
        raise ConfigError(found, where=WHERE)
    sizes = capacities(spec.capacity, machine.hardware.name, spec.longest)
    for capacity in sizes:
        cost = _cost(model, machine, jobs, capacity)
        try:
            return choose_layout(cost, jobs, capacity, machine.num_devices, machine.hardware.memory_bytes)
        except PlanError:
            if capacity == sizes[-1]:
                raise
    raise AssertionError("the last capacity returns or raises")


def _jobs(spec: RunSpec, data: Sequence[Dataset | None]) -> list[LayoutJob]:
    """The jobs with the tokens that their global batches have on average."""
    return [
        LayoutJob(_batch_tokens(job, own), cost_ranks(job.adapter).widest, job.gradient_sum == "any_order")
        for job, own in zip(spec.jobs, data, strict=True)
    ]


def _train_data(spec: RunSpec, model: ResolvedModel, base_dir: Path) -> list[Dataset | None]:
    """Of every job, prepared here and kept for the run; None where it cannot be, which the run will say."""
    tokenizer, found = load_tokenizer(model.source), list[Dataset | None]()
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


def device_forecaster(spec: RunSpec, model: ResolvedModel, machine: Machine) -> DeviceForecaster | None:
    """Chooses the layout again when jobs come and go; None where there are not several devices."""
    capacity = capacities(spec.capacity, machine.hardware.name, spec.longest)[0]
    devices = machine.num_devices or 1
    forecaster = DeviceForecaster(
        lambda jobs: _cost(model, machine, jobs, capacity), capacity, devices, machine.hardware.memory_bytes
    )
    return forecaster if devices > 1 else None


def _cost(
    model: ResolvedModel, machine: Machine, jobs: Sequence[LayoutJob | RemainingJob], capacity: int
) -> AnalyticCost:
    """The cost model of one of its devices, with adapters of these jobs."""
    return model.setup([job.rank for job in jobs]).cost(machine.hardware, capacity=capacity)
