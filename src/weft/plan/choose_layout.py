"""Which layout a run gets when it does not say: what fits, and of that what is predicted to be fastest.

Predicted for a global batch of every job, W tokens in microbatches of at most c, against one device. Where W is less
than c, a microbatch has what there is, which takes longer for each token. N devices as
    whole replicas   max(W / N, tokens of the largest job that adds gradients in order): such a job has one home
    shards           the same, slowed down where weights take longer to gather than a microbatch to compute
    stages           (microbatches + N − 1) times the slowest stage with its transfer; where jobs fill each other's
                     gaps, the pipeline is filled once in 32 N microbatches, and no job's step takes less than its own
                     microbatches + N − 1
    shards of stages as many pipelines as shards, each with its part of W, slowed down as shards are
All of them keep every bit. Tensor parallelism does not and is not chosen. Where two are within 2 %, the simpler one is.

The seconds are those of the simulator's cost models. The simulator (`simulate/layout_forecast.py`) plans and runs whole
programs instead: of 8 jobs of 16 samples on 8 devices it takes 5 to 10 s of a processor for every layout in stages,
while all layouts together take 0.04 s here (2026-11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.gather import ShardCost
from weft.plan.cost.types import CostModel, slot_seconds
from weft.plan.layout import Layout, ReplicaLayout
from weft.plan.pipeline.split import split_model
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
    is_any_order: bool = False
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
        verdict = f"{self.speed:.2f}x as fast as one" if self.device_bytes <= memory_bytes else "does not fit"
        needed = f"up to {size(self.device_bytes)} of {size(memory_bytes)} a device with full microbatches"
        return f"{name or self.layout}: {needed}, {verdict}"


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
        cuts = _powers(min(num_devices, cost.shape.num_layers))
        layouts += [Layout((ReplicaLayout(stages=n),)) for n in cuts]
        shared = [(num_devices // n, n) for n in cuts if num_devices % n == 0 and num_devices > n]
        layouts += [Layout((ReplicaLayout(shards=shards, stages=n),)) for shards, n in shared]
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
    speed = max(speeds) * _gain(cost, jobs, capacity, max(speeds) / sum(speeds))
    return LayoutOption(layout, max(needs for needs, _ in parts), speed)


def _replica(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, replica: ReplicaLayout) -> tuple[int, float]:
    """What the fullest device of a replica needs, and how fast it is against one device."""
    number, shards = replica.stages, replica.shards
    split = split_model(cost.shape, number)
    sharing = ShardCost(replace(cost, num_stages=number, tensor_parallel=replica.tensor, split=split), shards)
    rows, ranks = cost.rows([capacity]), [job.rank for job in jobs]
    needs = [sharing.memory.total_bytes(rows, ranks, stage=s, num_held=number - s) for s in range(number)]
    if number == 1 and shards > 1:
        return max(needs), _gain(cost, jobs, capacity, 1 / shards, sharing)

    def slot_s(num_tokens: int) -> float:
        return slot_seconds(sharing, number, [num_tokens])

    num_microbatches, num_tokens = _microbatches(sum(job.tokens for job in jobs), capacity)
    share = _share(jobs, 1 / shards)
    is_alone = len(jobs) == 1 or (shards > 1 and share == max(job.tokens for job in jobs))
    num_there, tokens_there = _microbatches(share, capacity)
    filling = (number - 1) * (1.0 if is_alone else num_there / (PROGRAM_MICROBATCHES * number))
    round_s = (num_there + filling) * slot_s(tokens_there)
    for job in jobs:
        # Its next global batch waits for its step, whoever trains beside it.
        num_own, own_tokens = _microbatches(job.tokens / (shards if job.is_any_order else 1), capacity)
        round_s = max(round_s, (num_own + number - 1) * slot_s(own_tokens))
    return max(needs), num_microbatches * slot_seconds(cost, 1, [num_tokens]) / round_s


def _gain(
    cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, part: float, sharing: CostModel | None = None
) -> float:
    """How much sooner a device is done that has a part of all tokens; `sharing`: its cost, if it shares weights."""
    total, share = max(1, sum(job.tokens for job in jobs)), max(1.0, _share(jobs, part))

    def round_s(model: CostModel, tokens: float) -> float:
        each = min(tokens, capacity)
        return tokens / each * slot_seconds(model, 1, [round(each)])

    # A microbatch counts as one sample, whose attention would gain from being cut.
    return min(total / share, round_s(cost, total) / round_s(sharing or cost, share))


def _share(jobs: Sequence[LayoutJob], part: float) -> float:
    """Tokens of the busiest replica; a job that adds gradients in order is on one replica with all of its tokens."""
    return max(part * sum(job.tokens for job in jobs), *(0 if job.is_any_order else job.tokens for job in jobs))


def _microbatches(tokens: float, capacity: int) -> tuple[int, int]:
    """How many so many tokens are, and the tokens of a full one."""
    return max(1, math.ceil(tokens / capacity)), min(capacity, max(1, round(tokens)))


def _powers(most: int) -> list[int]:
    return [number for number in (2, 4, 8, 16, 32, 64) if number <= most]
