"""The default layout of a run: of the layouts that fit, the one predicted to be fastest.

Predicted for a global batch of every job, W tokens in microbatches of at most c, relative to one device. If W is less
than c, a microbatch is smaller and takes longer per token. N devices as
    whole replicas   max(W / N, tokens of the largest job that adds gradients in order): such a job has one home
    shards           the same, slowed down where gathering weights takes longer than computing a microbatch
    stages           (microbatches + N − 1) times the slowest stage with its transfer; where jobs fill each other's
                     gaps, the pipeline is filled once in 32 N microbatches, and no job's step takes less than its own
                     microbatches + N − 1
    shards of stages as many pipelines as shards, each with its part of W, slowed down as shards are
All of them keep every bit. Tensor parallelism does not: where it is faster, a line reports that.
Within 2 %, the simpler layout is taken.

The seconds are those of the simulator's cost models. The simulator (`simulate/layout_forecast.py`) plans and runs whole
programs instead: of 8 jobs of 16 samples on 8 devices it takes 5 to 10 s of a processor for every layout in stages,
while all layouts together take 0.04 s here (2026-11).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError, counted, size
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.divided import ShardCost
from weft.plan.cost.memory import StateBytes
from weft.plan.cost.shape import ModelShape
from weft.plan.cost.types import CostModel, slot_seconds
from weft.plan.layout import Layout, ReplicaLayout

CLOSE = 0.02
"""Relative difference of speed below which the simpler layout is taken."""
CHOSEN = " (chosen, predicted)"
PROGRAM_MICROBATCHES = 32
"""Microbatches of a pipeline's program, per stage."""


@dataclass(frozen=True)
class LayoutJob:
    tokens: int
    rank: int
    is_any_order: bool = False
    """True if its sums do not depend on the order, so that replicas may share its samples."""
    num_parameters: int | None = None
    """Parameters of its adapter; None: those of a LoRA of `rank` on all linears."""
    state: StateBytes = StateBytes()


@dataclass(frozen=True)
class LayoutOption:
    layout: Layout
    device_bytes: int
    """Upper bound of the bytes on the fullest device, if each of its replicas had all jobs."""
    speed: float

    def line(self, memory_bytes: int, name: str | None = None) -> str:
        """A line of text; `name` replaces the layout's own."""
        result = f"{self.speed:.2f}x as fast as one" if self.device_bytes <= memory_bytes else "does not fit"
        needed = f"up to {size(self.device_bytes)} of {size(memory_bytes)} a device with full microbatches"
        return f"{name or self.layout}: {needed}, {result}"


@dataclass(frozen=True)
class LayoutChoice:
    chosen: LayoutOption
    options: tuple[LayoutOption, ...]
    memory_bytes: int
    other_bits: tuple[LayoutOption, ...] = ()
    """Layouts that fit and change bits, the fastest first; never chosen."""

    @property
    def ranked(self) -> list[LayoutOption]:
        """The options that fit: the chosen one, then the faster ones first."""
        others = [o for o in self.options if o is not self.chosen and o.device_bytes <= self.memory_bytes]
        return [self.chosen, *sorted(others, key=lambda option: -option.speed)]

    @property
    def lines(self) -> tuple[str, ...]:
        others = [option for option in self.options if option is not self.chosen]
        head = self.chosen.line(self.memory_bytes) + CHOSEN
        faster = [o for o in self.other_bits[:1] if o.speed * (1 - CLOSE) > self.chosen.speed]
        return (
            head,
            *(option.line(self.memory_bytes) for option in others),
            *(f"{o.line(self.memory_bytes)}; not chosen, since it changes bits: --layout {o.layout}" for o in faster),
        )


def choose_layout(
    cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, num_devices: int, memory_bytes: int
) -> LayoutChoice:
    """The layout over `num_devices` devices; `cost` is that of the backbone on one of them."""
    if num_devices < 1 or not jobs:
        raise PlanError(f"got {num_devices} devices and {len(jobs)} jobs; at least one of each.", where="--layout auto")
    layouts = [Layout()]
    if num_devices > 1:
        layouts += [Layout((ReplicaLayout(),) * num_devices), Layout((ReplicaLayout(shards=num_devices),))]
        cuts = [n for n in (2, 4, 8, 16, 32, 64) if n <= min(num_devices, cost.shape.num_layers)]
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
    divided = [Layout((ReplicaLayout(tensor=n),)) for n in (2, 4, 8) if n <= num_devices]
    priced = [price_layout(cost, jobs, capacity, layout) for layout in divided]
    other_bits = sorted((o for o in priced if o.device_bytes <= memory_bytes), key=lambda o: -o.speed)
    return LayoutChoice(chosen, tuple(options), memory_bytes, tuple(other_bits))


def price_layout(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, layout: Layout) -> LayoutOption:
    """Memory and speed of a layout; `cost` is that of the backbone on one device."""
    parts = [_replica(cost, jobs, capacity, replica) for replica in layout.replicas]
    speeds = [speed for _, speed in parts]
    speed = max(speeds) * _gain(cost, jobs, capacity, max(speeds) / sum(speeds))
    return LayoutOption(layout, max(needs for needs, _ in parts), speed)


def _replica(cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, replica: ReplicaLayout) -> tuple[int, float]:
    """Peak memory of a replica's fullest device, and its speed relative to one device."""
    number, shards = replica.stages, replica.shards
    split = split_model(cost.shape, number)
    sharing = ShardCost(replace(cost, num_stages=number, tensor_parallel=replica.tensor, split=split), shards)
    rows, ranks = cost.rows([capacity]), [job.rank for job in jobs]
    memory = sharing.memory
    needs = [
        memory.total_bytes(rows, ranks, stage=s, num_held=number - s)
        + math.ceil(sum(memory.unlike_bytes(job.rank, job.num_parameters, job.state, s) for job in jobs))
        for s in range(number)
    ]
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
        # Its next global batch waits for its step, whatever trains beside it.
        num_own, own_tokens = _microbatches(job.tokens / (shards if job.is_any_order else 1), capacity)
        round_s = max(round_s, (num_own + number - 1) * slot_s(own_tokens))
    return max(needs), num_microbatches * slot_seconds(cost, 1, [num_tokens]) / round_s


def _gain(
    cost: AnalyticCost, jobs: Sequence[LayoutJob], capacity: int, part: float, sharing: CostModel | None = None
) -> float:
    """Speed of a device that runs `part` of all tokens; `sharing`: its cost, if it shares weights."""
    total, share = max(1, sum(job.tokens for job in jobs)), max(1.0, _share(jobs, part))

    def round_s(model: CostModel, tokens: float) -> float:
        each = min(tokens, capacity)
        return tokens / each * slot_seconds(model, 1, [round(each)])

    # A microbatch counts as one sample, whose attention would seem to gain from division.
    return min(total / share, round_s(cost, total) / round_s(sharing or cost, share))


def _share(jobs: Sequence[LayoutJob], part: float) -> float:
    """Tokens of the busiest replica; a job that adds gradients in order is on one replica with all of its tokens."""
    return max(part * sum(job.tokens for job in jobs), *(0 if job.is_any_order else job.tokens for job in jobs))


def _microbatches(tokens: float, capacity: int) -> tuple[int, int]:
    """The number of microbatches for these tokens, and the tokens of a full one."""
    return max(1, math.ceil(tokens / capacity)), min(capacity, max(1, round(tokens)))


def split_layers(layer_s: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, from the seconds of every layer in order."""
    size = len(layer_s)
    if not 1 <= num_stages <= size:
        raise PlanError(f"{size} layers cannot be cut into {num_stages} stages; use 1 to {size}.")
    total = list(itertools.accumulate(layer_s, initial=0.0))
    # slowest[i]: the best cut of the layers from i on into the stages still to be filled; cuts hold its first end.
    slowest = [total[size] - total[i] for i in range(size)]
    cuts: list[list[int]] = []
    for left in range(2, num_stages + 1):
        ends = []
        for i in range(size - left + 1):
            options = [(max(total[j] - total[i], slowest[j]), -j) for j in range(i + 1, size - left + 2)]
            ends.append(min(options))
        slowest = [value for value, _ in ends]
        cuts.append([-j for _, j in ends])
    bounds = [0]
    for ends_of in reversed(cuts):
        bounds.append(ends_of[bounds[-1]])
    return tuple(end - start for start, end in itertools.pairwise([*bounds, size]))


def split_model(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage by weights, the output head counted into the last layer."""
    weights = [float(shape.layer_weights)] * shape.num_layers
    weights[-1] += shape.head_weights
    return split_layers(weights, num_stages)
