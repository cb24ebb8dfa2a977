"""Lower bounds that no schedule of a sweep can beat, whatever its packs, ways, degrees and order.

Work. A pack H run in way q takes d_q GPUs for T_q(H), and of its M microbatches

    M ≥ Σ rows_k / C'                                 everything goes through
    M ≥ max steps_k ≥ Σ steps_k · adapter_k / room_q     because Σ adapter_k ≤ room_q

so for every x in [0, 1]: d_q · T_q(H) ≥ Σ_k w_kq(x), with
    w_kq(x) = d_q · (own_kq + large'·f·rows_k + large · (x · rows_k / C' + (1 − x) · steps_k · adapter_k / room_q))
where f ≥ 1 is the least that whole tiles add to whole samples,
and the makespan is at least Σ_k min_q w_kq(x) / G; over q that hold k alone. The small line gives the same with its own
prices; of both lines the larger sum counts, since T is at least either.

Length. No configuration ends before its own rows and steps have gone through in its best way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.plan.sweep.cost import ROUNDING, Floats, PackCost, PackOption, SweepSetting
from weft.plan.sweep.types import Configuration

SHARES = tuple(i / 10 for i in range(11))
"""The x that are tried; each gives a valid bound."""


def lower_bound_s(cost: PackCost) -> float:
    return max(work_s(cost), length_s(cost))


def work_s(cost: PackCost) -> float:
    """Bound with all GPUs busy throughout, every configuration in its cheapest way."""
    counts = np.bincount(cost.kind_of, minlength=len(cost.kinds))
    rows, steps = cost.rows[:, None], cost.steps[:, None]
    by_rows, computed = rows / cost.filled, rows * _tiled(cost)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_memory = steps * cost.adapter / cost.room[cost.width]
    fits = _fits(cost)
    best = 0.0
    for line in (cost.small, cost.large):
        for share in SHARES:
            microbatches = share * by_rows + (1 - share) * np.where(fits, by_memory, 0.0)
            work = cost.degree * (cost.own + line[1] * computed + line[0] * microbatches)
            cheapest = np.where(fits, work, np.inf).min(axis=1)
            best = max(best, float(counts @ cheapest) / cost.setting.num_gpus)
    return best


def length_s(cost: PackCost) -> float:
    """Bound by the configuration that takes longest, alone in its fastest way."""
    rows, steps = cost.rows[:, None], cost.steps[:, None]
    count = np.maximum(rows / cost.filled, steps)
    computed = rows * _tiled(cost)
    frozen = np.maximum(*(line[0] * count + line[1] * computed for line in (cost.small, cost.large)))
    alone = np.where(_fits(cost), np.maximum(frozen + cost.own, cost.alone), np.inf)
    return float(alone.min(axis=1).max())


def _tiled(cost: PackCost) -> Floats:
    """Least ratio of computed to real rows, over all numbers of whole samples in a microbatch of way q."""
    found = []
    for filled, tile in zip(cost.filled, cost.tile, strict=True):
        real = np.arange(1, filled // cost.sample + 1) * cost.sample
        found.append((np.ceil(real / tile) * tile / real).min() * (1 - ROUNDING))
    return np.array(found)


def _fits(cost: PackCost) -> Floats:
    return np.asarray(cost.adapter <= cost.room[cost.width])


LAYER_LAUNCH_S = 256 / 1731 / 22
"""Forward and backward of one layer when the host sets the pace: TinyLlama's 22 layers at 1 x 256 run at 1,731
tokens/s, 147.9 ms a step or 6.72 ms a layer. Llama-3.1-8B's 32 at 1 x 512 and 1 x 256: 6.87 and 8.35 ms."""
GPU_TIMES = 18209 / 10918
"""PEFT's time on the GPU over that of the fused step: 18,209 rows/s against 10,918 (Llama-3.1-8B, PEFT's best batch).
TinyLlama: 2.11."""
KEPT_TIMES = 2.76
"""Bytes that PEFT keeps per row, over those of the fused step: 8.36 MB against 3.03 (Llama-3.1-8B, from peaks of 21.07
and 18.93 GB at 512 and 256 rows)."""
ADAPTER_BYTES = 16


@dataclass(frozen=True)
class Solo:
    setting: SweepSetting

    def gpu_bytes(self, configuration: Configuration, degree: int, num_samples: int) -> float:
        """Bytes per GPU with so many samples at once, padded to the longest."""
        setting, memory = self.setting, self.setting.memory(degree)
        rows = num_samples * configuration.most_tokens
        parameters = configuration.num_parameters
        if parameters is None:
            parameters = setting.shape.adapter_parameters(configuration.rank, configuration.targets)
        kept = KEPT_TIMES * rows * setting.shape.num_layers * memory.row_bytes(configuration.rank)
        return memory.weight_bytes() + ADAPTER_BYTES * parameters / degree + kept

    def cheapest(self, configuration: Configuration) -> tuple[int, float] | None:
        """The degree with the fewest GPU-seconds, and its seconds; None if no degree holds a single sample. Fewer GPUs
        may hold a large model's samples only one at a time; then more GPUs can be cheaper."""
        usable = self.setting.usable_bytes
        fitting = [d for d in self.setting.degrees if self.gpu_bytes(configuration, d, 1) <= usable]
        ways = [(degree, self.seconds(configuration, degree)) for degree in fitting]
        return min(ways, key=lambda way: (way[0] * way[1], way[0]), default=None)

    def seconds(self, configuration: Configuration, degree: int) -> float:
        """Seconds of the whole training, in the largest microbatches that fit."""
        most = 1
        while (
            most < configuration.batch_size
            and self.gpu_bytes(configuration, degree, most + 1) <= self.setting.usable_bytes
        ):
            most += 1
        passes = -(-configuration.batch_size // most)
        cost = self.setting.step_cost(PackOption(degree, 0, "none"), configuration)
        share, larger = divmod(configuration.batch_size, passes)
        counts = [share + 1] * larger + [share] * (passes - larger)
        times = {
            n: cost.forward_s([configuration.sample_tokens] * n, 0)
            + cost.backward_s([configuration.sample_tokens] * n, 0)
            for n in set(counts)
        }
        launch = LAYER_LAUNCH_S * self.setting.shape.num_layers
        step = sum(max(launch, GPU_TIMES * times[n]) for n in counts) + cost.step_s(0)
        # Evaluations are assumed to keep the GPU busy.
        forward = cost.forward_s([configuration.sample_tokens] * most, 0) / (configuration.sample_tokens * most)
        return configuration.num_steps * step + GPU_TIMES * configuration.forward_tokens * forward


def one_by_one_s(configurations: Sequence[Configuration], setting: SweepSetting) -> float | None:
    """The makespan of all configurations alone, each on the GPUs that cost least in all, longest first. None if a
    configuration does not fit alone, or on a CPU, where nothing was measured."""
    if setting.hardware.name == "cpu":
        return None
    solo, known, jobs = Solo(setting), dict[Configuration, tuple[int, float]](), []
    for configuration in configurations:
        kind = replace(configuration, name="-")
        if kind not in known:
            found = solo.cheapest(kind)
            if found is None:
                return None
            known[kind] = found
        jobs.append(known[kind])
    free = [0.0] * setting.num_gpus
    for degree, seconds in sorted(jobs, key=lambda job: (-job[0], -job[1])):
        taken = [heapq.heappop(free) for _ in range(degree)]
        for _ in range(degree):
            heapq.heappush(free, taken[-1] + seconds)
    return max(free)
