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
from weft.cost.gather import ShardCost
from weft.errors import PlanError
from weft.plan.layout import Layout, ReplicaLayout
from weft.wording import counted, size

CLOSE = 0.02
"""Part of the speed below which the simpler layout is taken."""
PROGRAM_MICROBATCHES = 32
"""Microbatches of a pipeline's program, for every stage."""


@dataclass(frozen=True)
class LayoutJob:
    """What is known of a job before it trains."""

    tokens: int
    """Of a global batch, on average."""
    rank: int
    is_free: bool = False
    """Its sums do not depend on any order, so that replicas may share its samples."""


@dataclass(frozen=True)
class LayoutOption:
    """A layout, what its fullest device needs, and how fast it is against one device."""

    layout: Layout
    device_bytes: int
    """With all jobs on each of its replicas, so at most."""
    speed: float

    def told(self, memory_bytes: int, name: str | None = None) -> str:
        """In one line; `name`: what whoever asked calls it."""
        verdict = f"{self.speed:.2f}x one device" if self.device_bytes <= memory_bytes else "does not fit"
        return f"{name or self.layout}: up to {size(self.device_bytes)} of {size(memory_bytes)} a device, {verdict}"


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that was chosen, and all that there were."""

    chosen: LayoutOption
    options: tuple[LayoutOption, ...]
    memory_bytes: int
    """Of a device."""

    @property
    def ranked(self) -> list[LayoutOption]:
        """All that fit: the chosen one, then the faster ones first."""
        others = [o for o in self.options if o is not self.chosen and o.device_bytes <= self.memory_bytes]
        return [self.chosen, *sorted(others, key=lambda option: -option.speed)]

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
    layouts = [Layout()]
    if num_devices > 1:
        layouts += [Layout((ReplicaLayout(),) * num_devices), Layout((ReplicaLayout(shards=num_devices),))]
        layouts += [Layout((ReplicaLayout(stages=n),)) for n in _powers(min(num_devices, cost.shape.num_layers))]
    options = [price_layout(cost, jobs, capacity, layout) for layout in layouts]
    fitting = [option for option in options if option.device_bytes <= memory_bytes]
    if not fitting:
        least = min(options, key=lambda option: option.device_bytes)
        raise PlanError(
            f"the backbone fits on no layout of {counted(num_devices, 'device')}: {least.layout} needs "
            f"{size(least.device_bytes)} a device, which have {size(memory_bytes)}; use a smaller capacity, quantize, "
            "or more devices.",
            where="--layout auto",
        )
    fastest = max(option.speed for option in fitting)
    chosen = next(option for option in fitting if option.speed >= fastest * (1 - CLOSE))
    return LayoutChoice(chosen, tuple(options), memory_bytes)


def price_layout(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, layout: Layout) -> LayoutOption:
    """What a layout needs and how fast it is; `cost` is that of the backbone on one device."""
    parts = [_replica(cost, jobs, capacity, replica) for replica in layout.replicas]
    speeds = [speed for _, speed in parts]
    total, alone = sum(job.tokens for job in jobs), max((job.tokens for job in jobs if not job.is_free), default=0)
    # A job whose sums are ordered has one home.
    speed = speeds[0] if len(parts) == 1 else total / max(total / sum(speeds), alone / max(speeds))
    return LayoutOption(layout, max(needs for needs, _ in parts), speed)


def _replica(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, replica: ReplicaLayout) -> tuple[int, float]:
    """What the fullest device of a replica needs, and how fast it is against one device."""
    if replica.shards > 1:
        return _shards(cost, jobs, capacity, replica.shards)
    number = replica.stages
    piped = replace(cost, num_stages=number, tensor_parallel=replica.tensor, split=None)
    slowest_s = max(_pass_s(piped, capacity, stage) for stage in range(number))
    slowest_s += 2 * cost.transfer_s(capacity) if number > 1 else 0.0
    num_microbatches = _num_microbatches(jobs, capacity)
    filling = (number - 1) * (1.0 if len(jobs) == 1 else num_microbatches / (PROGRAM_MICROBATCHES * number))
    speed = num_microbatches * _pass_s(cost, capacity, 0) / ((num_microbatches + filling) * slowest_s)
    return max(_needs(piped, jobs, capacity, stage, number - stage) for stage in range(number)), speed


def _shards(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, number: int) -> tuple[int, float]:
    sharing = ShardCost(cost, number)
    gather_s, compute_s = 2 * sharing.gather_s, _pass_s(cost, capacity, 0)
    total, alone = sum(job.tokens for job in jobs), max((job.tokens for job in jobs if not job.is_free), default=0)
    speed = total / max(total / number, alone) * compute_s / max(compute_s, gather_s)
    return sharing.memory.total_bytes(cost.rows([capacity]), [job.rank for job in jobs]), speed


def _num_microbatches(jobs: Sequence[LayoutJob], capacity: int) -> int:
    return max(1, -(-sum(job.tokens for job in jobs) // capacity))


def _pass_s(cost: AnalyticCost, capacity: int, stage: int) -> float:
    return cost.forward_s([capacity], stage) + cost.backward_s([capacity], stage)


def _needs(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, stage: int = 0, held: int = 1) -> int:
    ranks = [job.rank for job in jobs]
    return cost.memory.total_bytes(cost.rows([capacity]), ranks, stage=stage, num_held=held)


def _powers(most: int) -> list[int]:
    return [number for number in (2, 4, 8, 16, 32, 64) if number <= most]
