"""Time and memory of a pack of configurations, for every way of running it.

A way is a degree d, a microbatch of C rows, and a recomputation mode. The d GPUs of a pack share every layer (tensor
parallelism), or are stages. A kind is a class of configurations with equal cost. A pack H, run one way, takes M
microbatches, since all of it must go through and a configuration's next global batch waits for its step:

    M(H) = max(⌈Σ rows_k / C'⌉, max steps_k)            C' = C less what whole samples leave empty
    T(H) = max(small·M + small'·R, large·M + large'·R) + Σ own_k
    R    = M · (Σ rows_k / M, rounded up to whole samples and tiles)
    bytes per GPU = weights + kept of C rows + working space + Σ adapter_k ≤ share of the device

In stages all of that is of the slowest stage, with its transfers, and d microbatches are kept. Configurations fill each
other's gaps; but a global batch of m microbatches passes the stages before the next one of its configuration starts:

    T(H) ≥ max (1 + (d − 1) / m_k) · seconds of kind k alone

small and large are the two straight lines of the frozen step (bound by reading the weights, and by products); own_k is
attention, the adapter's kernels, the optimizer's steps and its evaluations. All of it is derived from `AnalyticCost`
and `MemoryModel`. PLoRA's appendix A has the same form: a base, and for every adapter its parameters, gradients,
moments and activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import PlanError, size
from weft.plan.choose_layout import split_model
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.hardware import Hardware
from weft.plan.cost.memory import MemoryModel, rank_class
from weft.plan.cost.shape import ALL_LINEAR, ModelShape
from weft.plan.cost.types import slot_seconds
from weft.plan.decoder import RECOMPUTE
from weft.plan.sweep.types import Configuration

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Lines = dict[tuple[int, str], tuple[tuple[float, float], tuple[float, float]]]
CAPACITIES = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Rows of a microbatch that are tried; more bring no gain."""
GPU_TILE, CPU_TILE = 2048, 128
"""Rows are computed in whole tiles, on a GPU of at most a whole microbatch, as in the engine."""
MOST_STAGES = 8
"""GPUs up to which a pack has any number of stages; above, and where GPUs share every layer, powers of two."""
ROUNDING = 1e-9
MANY = 2048
"""Rows far above where reading the weights bounds a step, on any known device."""


@dataclass(frozen=True, slots=True)
class PackOption:
    degree: int
    capacity: int
    recompute: str


@dataclass(frozen=True)
class SweepSetting:
    shape: ModelShape
    hardware: Hardware
    num_gpus: int = 1
    quantize: str = "none"
    recompute: str | None = None
    """Recomputation of every pack; None: the best mode for each."""
    capacity: int | None = None
    memory_share: float = 0.95
    """Usable share of a device; the rest is for the driver and the allocator."""
    max_degree: int | None = None
    """Largest number of GPUs of a pack; None: all."""
    plain_row_bytes: int | None = None
    """As in `MemoryModel`."""
    in_stages: bool = False
    """True if the GPUs of a pack are stages, which keeps every bit; otherwise they share every layer."""
    groups: tuple[int, ...] | None = None
    """GPUs of each group, together all there are; None: the best."""

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise PlanError(f"got {self.num_gpus}; a sweep needs at least 1.", where="gpus")
        if not 0 < self.memory_share <= 1:
            raise PlanError(f"got {self.memory_share:g}; it is above 0 and at most 1.", where="memory_share")
        if self.capacity is not None and self.capacity < 1:
            raise PlanError(f"got {self.capacity}; a microbatch holds at least 1 row.", where="capacity")

    @property
    def degrees(self) -> list[int]:
        if self.groups is not None:
            return sorted({*self.groups})
        most = min(self.num_gpus, self.max_degree or self.num_gpus)
        if self.in_stages:
            most = min(most, self.shape.num_layers)
            if most <= MOST_STAGES:
                return list(range(1, most + 1))
        return [1 << i for i in range(most.bit_length())]

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_share * self.hardware.memory_bytes)

    def memory(self, degree: int, recompute: str = "none") -> MemoryModel:
        return self.step_cost(PackOption(degree, 0, recompute)).memory

    def step_cost(self, way: PackOption, kind: Configuration | None = None) -> AnalyticCost:
        """The cost model of a way with one adapter, or with none."""
        rank, targets, num = (0, ALL_LINEAR, None) if kind is None else (kind.rank, kind.targets, kind.num_parameters)
        setup = BackboneSetup(self.shape, (rank,), self.quantize, way.recompute, num, self.plain_row_bytes)
        if self.in_stages:
            return setup.cost(self.hardware, way.degree, targets=targets, split=split_model(self.shape, way.degree))
        return setup.cost(self.hardware, tensor_parallel=way.degree, targets=targets)

    def adapter_bytes(self, kind: Configuration, degree: int) -> int:
        memory = self.step_cost(PackOption(degree, 0, "none"), kind).memory
        return max(memory.adapter_bytes(kind.rank, kind.targets, stage) for stage in range(memory.num_stages))

    def ways(self, longest: int) -> list[PackOption]:
        if self.capacity is None:
            least = -(-longest // 64) * 64
            capacities = sorted({c for c in CAPACITIES if c >= longest} | {least})
        elif self.capacity < longest:
            raise PlanError(
                f"got {self.capacity}, and a sample has {longest} tokens; it must hold the longest.", where="capacity"
            )
        else:
            capacities = [self.capacity]
        modes = RECOMPUTE if self.recompute is None else (self.recompute,)
        return [PackOption(d, rows, mode) for d in self.degrees for rows in capacities for mode in modes]


class PackCost:
    def __init__(self, configurations: Sequence[Configuration], setting: SweepSetting) -> None:
        if not configurations:
            raise PlanError("got no configurations; a sweep plans at least one.", where="configurations")
        for name, count in Counter(c.name for c in configurations).items():
            if count > 1:
                raise PlanError("is given twice; every configuration has its own name.", where=name)
        self.setting = setting
        unnamed = [replace(c, name="-") for c in configurations]
        self.kinds = list(dict.fromkeys(unnamed))
        self.kind_of = [self.kinds.index(c) for c in unnamed]
        self.configurations = list(configurations)
        self.ways = setting.ways(max(c.most_tokens for c in self.kinds))
        self._prices: dict[tuple[Any, ...], tuple[float, float, float, float]] = {}
        self._tabulate()
        for kind, configuration in zip(self.kind_of, configurations, strict=True):
            if not any(np.isfinite(self.price([kind], degree)[0]) for degree in setting.degrees):
                raise PlanError(self._why_never(kind), where=configuration.name)

    def _tabulate(self) -> None:
        kinds, ways, setting = self.kinds, self.ways, self.setting
        self.degree = np.array([way.degree for way in ways])
        capacity = np.array([way.capacity for way in ways], dtype=float)
        tile = CPU_TILE if setting.hardware.name == "cpu" else GPU_TILE
        self.tile = np.minimum(tile, capacity)
        self.rows = np.array([k.num_tokens for k in kinds], dtype=float)
        self.steps = np.array([k.num_steps for k in kinds], dtype=float)
        self.sample = max(k.sample_tokens for k in kinds)
        self.filled = capacity // self.sample * self.sample
        """C': rows of a microbatch that whole samples fill."""
        lines = {(w.degree, w.recompute): self._lines(w) for w in ways}
        self.small, self.large = (
            np.array([lines[w.degree, w.recompute][i] for w in ways]).T for i in range(2)
        )  # [intercept and slope, q]
        self.own = np.array([[self._own_s(kind, q, lines) for q in range(len(ways))] for kind in kinds])
        self.alone = self._alone_s()
        """Least seconds of a pack with a kind in stages; 0 where GPUs share every layer."""
        self.adapter = np.array([[setting.adapter_bytes(k, w.degree) for w in ways] for k in kinds], dtype=float)
        self.rank_classes = sorted({rank_class([k.rank]) for k in kinds})
        bases = [[self._base_bytes(way, widest) for way in ways] for widest in self.rank_classes]
        self.room = setting.usable_bytes - np.array(bases, dtype=float)
        """Bytes for adapters, by widest rank class and way; below 0: not even the microbatch fits."""
        self.width = np.array([self.rank_classes.index(rank_class([k.rank])) for k in kinds])

    def _alone_s(self) -> Floats:
        length = np.array([k.sample_tokens for k in self.kinds], dtype=float)[:, None]
        batch = np.array([k.batch_size for k in self.kinds], dtype=float)[:, None]
        count = np.ceil(batch / np.maximum(self.filled // length, 1))
        computed = np.ceil(np.ceil(batch / count) * length / self.tile) * self.tile
        slot = np.maximum(*(line[0] + line[1] * computed for line in (self.small, self.large)))
        alone = (1 + (self.degree - 1) / count) * (self.steps[:, None] * count * slot + self.own)
        return np.asarray(np.where(self.setting.in_stages & (self.degree > 1), alone, 0.0))

    def _lines(self, way: PackOption) -> tuple[tuple[float, float], tuple[float, float]]:
        """(intercept, slope) over rows of the frozen step bound by reading weights, and bound by products."""
        cost = self.setting.step_cost(way)
        one, two, many, twice = (_both_s(cost, [1] * n) for n in (1, 2, MANY, 2 * MANY))
        slope = (twice - many) / MANY
        return (2 * one - two, two - one), (2 * many - twice, slope)

    def _own_s(self, kind: Configuration, q: int, lines: Lines) -> float:
        """Seconds of a kind's training beyond the frozen rows: attention, adapter, optimizer, evaluations."""
        way = self.ways[q]
        key = (kind.rank, kind.num_parameters, kind.sample_tokens, kind.targets, way.degree, way.recompute)
        if key not in self._prices:
            _, (fixed, row) = lines[way.degree, way.recompute]
            adapted = self.setting.step_cost(way, kind)
            length = kind.sample_tokens
            count = -(-MANY // length)
            frozen = fixed + row * count * length
            once, twice = (
                _both_s(adapted, [length] * (n * count)) - frozen - (n - 1) * (frozen - fixed) for n in (1, 2)
            )
            each = (twice - once) / count
            # Evaluations that are due together share microbatches, which are assumed full.
            stages = range(adapted.num_stages)
            token_s = max(adapted.forward_s([length] * count, stage) for stage in stages) / (count * length)
            self._prices[key] = each, once - count * each, max(map(adapted.step_s, stages)), token_s
        sample_s, visit_s, step_s, token_s = self._prices[key]
        visits = max(kind.num_steps, kind.num_tokens / float(self.filled[q]))
        own_s = kind.num_samples * sample_s + visits * visit_s + kind.num_steps * step_s
        return own_s + kind.forward_tokens * token_s

    def _base_bytes(self, way: PackOption, widest: int) -> int:
        """Bytes per GPU of a pack beside its adapters, whose largest rank is `widest`."""
        memory = self.setting.memory(way.degree, way.recompute)
        number = memory.num_stages
        return max(
            memory.weight_bytes(stage) + (number - stage) * memory.microbatch_bytes(way.capacity, widest, stage)
            for stage in range(number)
        )

    def prefixes(self, kinds: Sequence[int], degree: int) -> tuple[Floats, Ints]:
        """Seconds of every prefix of a list of kinds as one pack in its best way (inf: none fits), and that way."""
        ways = np.flatnonzero(self.degree == degree)
        order = np.asarray(kinds)
        rows = np.cumsum(self.rows[order])[:, None]
        steps = np.maximum.accumulate(self.steps[order])[:, None]
        seconds = self._seconds(rows, steps, np.cumsum(self.own[np.ix_(order, ways)], axis=0), ways)
        seconds = np.maximum(seconds, np.maximum.accumulate(self.alone[np.ix_(order, ways)], axis=0))
        held = np.cumsum(self.adapter[np.ix_(order, ways)], axis=0)
        room = self.room[np.ix_(np.maximum.accumulate(self.width[order]), ways)]
        seconds[held > room] = np.inf
        best = seconds.argmin(axis=1)
        return seconds[np.arange(len(order)), best], ways[best]

    def price(self, kinds: Sequence[int], degree: int) -> tuple[float, int]:
        """Seconds of one pack in its best way, and that way; inf if it does not fit."""
        seconds, ways = self.prefixes(kinds, degree)
        return float(seconds[-1]), int(ways[-1])

    def seconds(self, kinds: Sequence[int], way: int) -> float:
        order, ways = np.asarray(kinds), np.array([way])
        own = self.own[np.ix_(order, ways)].sum(axis=0)
        seconds = self._seconds(self.rows[order].sum(), self.steps[order].max(), own, ways)[0]
        return float(max(seconds, self.alone[order, way].max()))

    def _seconds(self, rows: Any, steps: Any, own: Floats, ways: Ints) -> Floats:
        filled, tile = self.filled[ways], self.tile[ways]
        count = np.maximum(np.ceil(rows / filled), steps)
        samples = np.ceil(rows / count / self.sample - ROUNDING)
        computed = count * tile * np.ceil(samples * self.sample / tile)
        small, large = self.small[:, ways], self.large[:, ways]
        frozen = np.maximum(small[0] * count + small[1] * computed, large[0] * count + large[1] * computed)
        return np.asarray(frozen + own)

    def gpu_bytes(self, kinds: Sequence[int], way: PackOption) -> int:
        members = [self.kinds[k] for k in kinds]
        adapters = sum(self.setting.adapter_bytes(kind, way.degree) for kind in members)
        return adapters + self._base_bytes(way, max(kind.rank for kind in members))

    def _why_never(self, kind: int) -> str:
        setting, degree = self.setting, self.setting.degrees[-1]
        needs = [(self.gpu_bytes([kind], way), way) for way in self.ways if way.degree == degree]
        needed, way = min(needs, key=lambda need: need[0])
        rank = self.kinds[kind].rank
        weights, adapter = setting.memory(degree).weight_bytes(), setting.adapter_bytes(self.kinds[kind], degree)
        return (
            f"fits on no number of GPUs up to {setting.num_gpus}: on {degree} each needs {size(needed)} "
            f"({size(weights)} weights, {size(adapter)} adapter of rank {rank} with its optimizer, "
            f"{size(needed - weights - adapter)} for a microbatch of {way.capacity:,} rows), and of its "
            f"{size(setting.hardware.memory_bytes)} {size(setting.usable_bytes)} may be used."
        )


def _both_s(cost: AnalyticCost, lengths: Sequence[int]) -> float:
    return slot_seconds(cost, cost.num_stages, lengths)
