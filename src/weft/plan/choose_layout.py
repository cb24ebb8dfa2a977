"""Which layout a run gets when it does not say: what fits, and of that what is predicted to be fastest.

Predicted for a global batch of every job, W tokens in microbatches of at most c, against one device that needs t for a
full one. N devices as
    whole replicas   max(W / N, tokens of the largest job whose sums are ordered): such a job has one home
    shards           the same, slowed down where weights take longer to gather than a microbatch to compute
    stages           (microbatches + N − 1) times the slowest stage with its transfer; where jobs fill each other's
                     gaps, the pipeline is filled once in 32 N microbatches
All of them keep every bit. Tensor parallelism does not and is not chosen. Where two are within 2 %, the simpler one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.cost.analytic import AnalyticCost
from weft.errors import PlanError
from weft.plan.layout import Layout, ReplicaLayout

CLOSE = 0.02
"""Part of the speed below which the simpler layout is taken."""
PROGRAM_MICROBATCHES = 32
"""Microbatches of a pipeline's program, for every stage."""
GIB = 2**30


@dataclass(frozen=True)
class LayoutJob:
    """What is known of a job before its data is read."""

    tokens: int
    """Of a global batch, at most."""
    rank: int
    is_free: bool = False
    """Its sums do not depend on any order, so that replicas may share its samples."""


@dataclass(frozen=True)
class LayoutOption:
    """A layout, what its fullest device needs, and how fast it is against one device."""

    layout: Layout
    device_bytes: int
    speed: float

    def told(self, memory_bytes: int) -> str:
        """In one line."""
        needs = f"{self.device_bytes / GIB:,.2f} of {memory_bytes / GIB:,.2f} GiB a device"
        verdict = f"{self.speed:.2f}x one device" if self.device_bytes <= memory_bytes else "does not fit"
        return f"{self.layout}: {needs}, {verdict}"


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that was chosen, and all that there were."""

    chosen: LayoutOption
    options: tuple[LayoutOption, ...]
    memory_bytes: int
    """Of a device."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The choice and its reasons."""
        others = [option for option in self.options if option is not self.chosen]
        head = f"{self.chosen.told(self.memory_bytes)} (chosen, predicted)"
        return (head, *(option.told(self.memory_bytes) for option in others))


def choose_layout(
    cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, num_devices: int, memory_bytes: int
) -> LayoutChoice:
    """The layout over so many devices of that memory; `cost` is that of the backbone on one of them."""
    if num_devices < 1 or not jobs:
        raise PlanError(f"got {num_devices} devices and {len(jobs)} jobs; at least one of each.", where="--layout auto")
    options = [_whole(cost, jobs, capacity, 1)]
    if num_devices > 1:
        options += [_whole(cost, jobs, capacity, num_devices), _shards(cost, jobs, capacity, num_devices)]
        options += [_stages(cost, jobs, capacity, n) for n in _powers(min(num_devices, cost.shape.num_layers))]
    fitting = [option for option in options if option.device_bytes <= memory_bytes]
    if not fitting:
        least = min(options, key=lambda option: option.device_bytes)
        raise PlanError(
            f"the backbone fits on no layout of {num_devices} devices: {least.layout} needs "
            f"{least.device_bytes / GIB:,.2f} GiB a device, which have {memory_bytes / GIB:,.2f}; use a smaller "
            "capacity, quantize, or more devices.",
            where="--layout auto",
        )
    fastest = max(option.speed for option in fitting)
    chosen = next(option for option in fitting if option.speed >= fastest * (1 - CLOSE))
    return LayoutChoice(chosen, tuple(options), memory_bytes)


def _whole(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, number: int) -> LayoutOption:
    return LayoutOption(Layout((ReplicaLayout(),) * number), _needs(cost, jobs, capacity), _shared_speed(jobs, number))


def _shards(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, number: int) -> LayoutOption:
    shared = cost.memory.weight_bytes() * (number - 1) / number
    gather_s, compute_s = 2 * shared / cost.hardware.link_rate, _pass_s(cost, capacity, 0)
    needs = _needs(cost, jobs, capacity) - round(shared)
    speed = _shared_speed(jobs, number) * compute_s / max(compute_s, gather_s)
    return LayoutOption(Layout((ReplicaLayout(shards=number),)), needs, speed)


def _stages(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, number: int) -> LayoutOption:
    piped = replace(cost, num_stages=number, split=None)
    slowest_s = max(_pass_s(piped, capacity, stage) for stage in range(number)) + 2 * cost.transfer_s(capacity)
    num_microbatches = max(1, -(-sum(job.tokens for job in jobs) // capacity))
    filling = (number - 1) * (1.0 if len(jobs) == 1 else num_microbatches / (PROGRAM_MICROBATCHES * number))
    seconds = (num_microbatches + filling) * slowest_s
    speed = num_microbatches * _pass_s(cost, capacity, 0) / seconds
    needs = max(_needs(piped, jobs, capacity, stage, number - stage) for stage in range(number))
    return LayoutOption(Layout((ReplicaLayout(stages=number),)), needs, speed)


def _shared_speed(jobs: Sequence[LayoutJob], number: int) -> float:
    """Of replicas among which jobs are shared out: a job whose sums are ordered has one home."""
    total = sum(job.tokens for job in jobs)
    alone = max((job.tokens for job in jobs if not job.is_free), default=0)
    return total / max(total / number, alone)


def _pass_s(cost: AnalyticCost, capacity: int, stage: int) -> float:
    return cost.forward_s([capacity], stage) + cost.backward_s([capacity], stage)


def _needs(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, stage: int = 0, held: int = 1) -> int:
    ranks = [job.rank for job in jobs]
    return cost.memory.total_bytes(cost.rows([capacity]), ranks, stage=stage, num_held=held)


def _powers(most: int) -> list[int]:
    return [number for number in (2, 4, 8, 16, 32, 64) if number <= most]
