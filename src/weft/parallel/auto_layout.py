"""Chooses a layout over the devices of a machine, or predicts what a named one does.

Of the model, only its configuration and its tokenizer are read; of the jobs, their data (`outlines`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from weft.data.dataset import Dataset, GlobalBatches, JobData
from weft.data.load import load_job_data
from weft.data.order import BatchSchedule
from weft.errors import ConfigError, PlanError, WeftError, counted, rough_time
from weft.kernels.device import device_name, gpus, is_cpu, total_bytes
from weft.methods.registry import cost_ranks, has_kernels
from weft.model.resolve import ResolvedModel, choose_device, hardware_here
from weft.model.source import load_tokenizer
from weft.plan.choose_layout import CHOSEN, CLOSE, LayoutChoice, LayoutJob, LayoutOption, choose_layout, price_layout
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import GB, Hardware, find_hardware
from weft.plan.cost.memory import job_state
from weft.plan.cost.shape import capacities
from weft.plan.deploy.types import batch_samples
from weft.plan.layout import Layout, parse_layout
from weft.plan.replan import DeviceForecaster, RemainingJob
from weft.plan.simulate.forecast import JobOutline
from weft.plan.sweep.forecast import PackForecaster, can_be_packs
from weft.plan.types import Batch, JobQueue
from weft.spec import JobSpec, RunSpec
from weft.spec.run import memory_fraction

WHERE = "--layout"


class Machine(NamedTuple):
    hardware: Hardware
    num_devices: int | None
    is_here: bool = True

    @property
    def is_cpu(self) -> bool:
        return self.hardware.name == "cpu"

    @property
    def elsewhere(self) -> Hardware | None:
        return None if self.is_here else self.hardware


class ChosenLayout(NamedTuple):
    layout: Layout
    lines: tuple[str, ...]
    predicted: LayoutOption | None = None
    homes: Mapping[str, int] = MappingProxyType({})
    """The replica that each job is planned on, where one is."""
    packs: PackForecaster | None = None
    """Chooses the layout again as trials begin and end; None if they are not planned in packs."""


class NamedLayout(NamedTuple):
    predicted: LayoutOption
    memory_bytes: int
    lines: tuple[str, ...]


def machine_here(spec: RunSpec) -> Machine:
    """Cores of this machine, each with its share of the memory, or its GPUs; ConfigError for unknown ones."""
    if is_cpu(choose_device(spec.backbone)):
        cores = os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cores
        return Machine(replace(hardware_here("cpu"), memory_bytes=memory), cores)
    names = sorted({device_name(gpu) for gpu in gpus()})
    if len(names) > 1:
        raise ConfigError(
            f"this machine has unlike GPUs ({', '.join(names)}); give a layout and --devices.", where=WHERE
        )
    try:
        table = hardware_here(names[0])
    except ConfigError:
        raise ConfigError(f"nothing is known of {names[0]}; give a layout, such as spread:2.", where=WHERE) from None
    memory = min(total_bytes(gpu) for gpu in gpus())
    if spec.memory_limit is not None:
        memory = int(memory * memory_fraction(spec.memory_limit, memory))
    return Machine(replace(table, memory_bytes=memory), len(gpus()))


def machine_of(spec: RunSpec, device: str, num_devices: int | None) -> Machine:
    """Machine to plan for: `num_devices` of a kind in the hardware table. `auto`, or the kind of this machine without a
    number, means this machine."""
    if device == "auto" and num_devices is None:
        return machine_here(spec)
    here = None
    with suppress(ConfigError):
        here = machine_here(spec)
    if device == "auto":
        if here is None:
            raise ConfigError("nothing is known of the devices here; give --device too.", where="--gpus")
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
    """Fastest layout of a run that `check` accepts. With `in_stages` one device is chosen only if no other layout is
    possible."""
    choice = _choice(spec, model, _jobs(spec, model, _train_data(spec, model, base_dir)), machine)
    refused: dict[str, list[str]] = {}
    for option in choice.ranked:
        if option.layout.is_one_device and in_stages:
            continue
        try:
            check(option.layout)
        except WeftError as error:
            refused.setdefault(str(error), []).append(str(option.layout))
            continue
        other_bits = tuple(other for other in choice.other_bits if _is_possible(other.layout, check))
        found = replace(choice, chosen=option, other_bits=other_bits)
        return ChosenLayout(option.layout, (*found.lines, *_why_not(refused), *_links(machine)), option)
    why = "one device, because no other can be" if not in_stages else "one device, because none in stages can be"
    return ChosenLayout(Layout(), (why, *_why_not(refused)))


def choose_in_packs(
    spec: RunSpec,
    model: ResolvedModel,
    base_dir: Path,
    machine: Machine,
    found: ChosenLayout,
    check: Callable[[Layout], None],
) -> ChosenLayout:
    """The layout in which the packs of a sweep's trials end first, if that is clearly before they end in the one
    found."""
    jobs = _remaining_jobs(spec, model, base_dir)
    if not jobs or (machine.num_devices or 1) == 1 or not can_be_packs(found.layout, jobs):
        return found
    forecast = None
    for capacity in capacities(spec.capacity, machine.hardware.name, spec.longest):
        packs = PackForecaster(_cost(spec, model, machine, jobs, capacity), capacity, machine.num_devices or 1)
        with suppress(PlanError):
            forecast = packs(jobs, found.layout)
            break
    if forecast is None:
        return found
    planned, now = forecast.planned, forecast.now
    if now is not None and planned.left_s > (1 - CLOSE) * now.left_s:
        return found._replace(homes=now.homes, packs=packs)
    try:
        check(planned.layout)
    except WeftError:
        return found
    instead = "" if now is None else f", in {found.layout} after {rough_time(now.left_s)}"
    line = f"{planned.layout}: the packs of these trials end after about {rough_time(planned.left_s)}{instead}"
    others = (found.lines[0].removesuffix(CHOSEN), *found.lines[1:])
    return ChosenLayout(planned.layout, (line + CHOSEN, *others), homes=planned.homes, packs=packs)


def _is_possible(layout: Layout, check: Callable[[Layout], None]) -> bool:
    try:
        check(layout)
    except WeftError:
        return False
    return True


def _why_not(refused: dict[str, list[str]]) -> list[str]:
    return [f"{', '.join(layouts)} not possible: {why}" for why, layouts in refused.items()]


def _links(machine: Machine) -> tuple[str, ...]:
    found = machine.hardware
    if found.links == "assumed":
        return ()
    return (f"links measured here: {found.link_rate / GB:.3g} GB/s and {found.link_s * 1e6:,.0f} us a message",)


def predicted_on(spec: RunSpec, model: ResolvedModel, layout: str, base_dir: Path, machine: Machine) -> NamedLayout:
    """Predicted memory and gain of a given layout on devices of this kind."""
    wanted = parse_layout(layout, where=WHERE)
    num, there = wanted.num_devices, machine.num_devices or wanted.num_devices
    # Processes that outnumber the cores share their memory too.
    memory = machine.hardware.memory_bytes * there // max(there, num)
    if num > there and not machine.is_here:
        raise ConfigError(f"{layout} has {counted(num, 'device')}, and --gpus gives {there}.", where=WHERE)
    jobs = _jobs(spec, model, _train_data(spec, model, base_dir))
    for capacity in capacities(spec.capacity, machine.hardware.name, spec.longest):
        option = price_layout(_cost(spec, model, machine, jobs, capacity), jobs, capacity, wanted)
        if option.device_bytes <= memory:
            break
    line = f"{option.line(memory, layout)} (predicted)"
    cores = counted(there, "core")
    shared = f"{num} processes would share the {cores} here: that is the speed of {num} cores, not of these"
    return NamedLayout(option, memory, (line, shared) if num > there else (line,))


def _choice(spec: RunSpec, model: ResolvedModel, jobs: Sequence[LayoutJob], machine: Machine) -> LayoutChoice:
    """Choice at the largest capacity at which a layout fits."""
    if machine.num_devices is None:
        found = f"auto chooses over several devices; give the number of {machine.hardware.name} with --gpus N."
        raise ConfigError(found, where=WHERE)
    sizes = capacities(spec.capacity, machine.hardware.name, spec.longest)
    for capacity in sizes:
        cost = _cost(spec, model, machine, jobs, capacity)
        try:
            return choose_layout(cost, jobs, capacity, machine.num_devices, machine.hardware.memory_bytes)
        except PlanError:
            if capacity == sizes[-1]:
                raise
    raise AssertionError("the last capacity returns or raises")


def _jobs(spec: RunSpec, model: ResolvedModel, data: Sequence[Dataset | None]) -> list[LayoutJob]:
    sizes = model.adapter_sizes([job.adapter for job in spec.jobs])
    return [
        LayoutJob(
            _batch_tokens(job, own),
            cost_ranks(job.adapter).widest,
            job.gradient_sum == "any_order",
            num,
            job_state(job),
        )
        for job, own, num in zip(spec.jobs, data, sizes, strict=True)
    ]


def _train_data(spec: RunSpec, model: ResolvedModel, base_dir: Path) -> list[Dataset | None]:
    tokenizer, found = load_tokenizer(model.source), list[Dataset | None]()
    for job in spec.jobs:
        try:
            found.append(load_job_data(job, tokenizer, base_dir).train)
        except WeftError:
            found.append(None)
    return found


def _remaining_jobs(spec: RunSpec, model: ResolvedModel, base_dir: Path) -> list[RemainingJob]:
    """The jobs whose data can be read, from their beginning."""
    data = _train_data(spec, model, base_dir)
    sizes = model.adapter_sizes([job.adapter for job in spec.jobs])
    return [
        remaining_job(job, own, BatchSchedule.of(job, *own.sizes).num_steps, own.summary.max_length, num)
        for job, own, num in zip(spec.jobs, data, sizes, strict=True)
        if own is not None
    ]


MOST_LENGTHS = 4096
"""Samples of a job whose lengths are used, the longest among them."""


def remaining_job(
    spec: JobSpec, train: Dataset, num_steps: int, longest: int, num_parameters: int | None
) -> RemainingJob:
    """A job for the planner; may run beside training, so it reads nothing that changes."""
    lengths = np.sort(train.samples.lengths)
    chosen = np.linspace(0, len(lengths) - 1, min(len(lengths), MOST_LENGTHS)).round().astype(int)
    return RemainingJob(
        spec.name,
        batch_size=batch_samples(spec.batch_size, train.num_groups, len(lengths)),
        lengths=(*lengths[chosen].tolist(), longest),
        rank=cost_ranks(spec.adapter).widest,
        num_steps=num_steps,
        is_any_order=spec.gradient_sum == "any_order",
        num_parameters=num_parameters,
        state=job_state(spec),
    )


def _batch_tokens(job: JobSpec, train: Dataset | None) -> int:
    """Mean number of tokens of a global batch and its reference passes; without data, `max_length` for each sample."""
    if train is None:
        return job.batch_size * job.max_length
    order = BatchSchedule.of(job, *train.sizes)
    # Reference passes run forward only, which takes about half as long.
    reference_tokens = train.reference_tokens(order.num_tokens) // 2
    return max(1, -(-(order.num_tokens(train.group_tokens) + reference_tokens) // order.num_steps))


def device_forecaster(spec: RunSpec, model: ResolvedModel, machine: Machine) -> DeviceForecaster | None:
    """Forecaster of layouts when jobs come and go; None on one device."""
    capacity = capacities(spec.capacity, machine.hardware.name, spec.longest)[0]
    devices = machine.num_devices or 1
    forecaster = DeviceForecaster(
        lambda jobs: _cost(spec, model, machine, jobs, capacity), capacity, devices, machine.hardware.memory_bytes
    )
    return forecaster if devices > 1 else None


def _cost(
    spec: RunSpec, model: ResolvedModel, machine: Machine, jobs: Sequence[LayoutJob | RemainingJob], capacity: int
) -> AnalyticCost:
    numbers = [job.rank for job in jobs], [job.num_parameters for job in jobs]
    setup = model.setup(*numbers, [job.adapter for job in spec.jobs])
    return setup.cost(machine.hardware, capacity=capacity)


def outlines(model: ResolvedModel, jobs: Sequence[JobSpec], base_dir: Path, num_planned: int) -> list[JobOutline]:
    tokenizer = load_tokenizer(model.source)
    vocabulary = model.config.get("vocab_size", 0)
    return [
        replace(
            _outline(job, load_job_data(job, tokenizer, base_dir), num_planned, is_fused=model.is_fused),
            # New tokens have a row in the embedding and in the head, unless these are tied.
            num_trained_rows=job.adapter.own_rows.count(vocabulary) + 2 * len(job.adapter.new_tokens),
            num_parameters=num,
        )
        for job, num in zip(jobs, model.adapter_sizes([job.adapter for job in jobs]), strict=True)
    ]


def _outline(job: JobSpec, data: JobData, num_planned: int, *, is_fused: bool) -> JobOutline:
    order = BatchSchedule.of(job, *data.train.sizes)
    ahead, planned = GlobalBatches(data.train, order), min(order.num_steps, num_planned)
    batches = tuple(Batch(step, 0, tuple(ahead.lengths(step)), ahead.groups(step)) for step in range(planned))
    # As in `Backbone.lane`: methods without kernels run in microbatches of their own.
    lane = "reference" if is_fused and not has_kernels(job.adapter) else ""
    queue = JobQueue(job.name, batches, planned == order.num_steps, job.priority, lane=lane)
    return JobOutline(
        queue=queue,
        num_steps=order.num_steps,
        num_tokens=order.num_tokens(data.train.group_tokens),
        cost_rank=cost_ranks(job.adapter).widest,
        rank=job.adapter.rank,
        forward_tokens=data.forward_tokens(order, job.eval_steps),
        state=job_state(job),
        is_any_order=job.gradient_sum == "any_order",
        experts=job.adapter.experts_in_words,
    )
