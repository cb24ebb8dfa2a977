"""One configuration at a time with Hugging Face PEFT: what a sweep is compared with.

A step is one or more microbatches of whole samples, as many at once as fit; each takes the longer of what the host
needs to launch it and what the GPU needs to run it. Every constant was measured on one H200 (benchmarks/h200.json);
where two measurements differ, the one that is better for PEFT counts. A host of another GPU is taken to be as fast,
padding to cost nothing, and tensor parallelism to add no launches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.plan.sweep.cost import PackOption, SweepSetting
from weft.plan.sweep.types import Configuration

LAYER_LAUNCH_S = 256 / 1731 / 22
"""Forward and backward of one layer when the host sets the pace: TinyLlama's 22 layers at 1 x 256 run at 1,731
tokens/s, 147.9 ms a step or 6.72 ms a layer. Llama-3.1-8B's 32 at 1 x 512 and 1 x 256: 6.87 and 8.35 ms."""
GPU_TIMES = 18209 / 10918
"""The GPU's time over the fused step's: Llama-3.1-8B, best batch, 18,209 rows/s against 10,918. TinyLlama: 2.11."""
KEPT_TIMES = 2.76
"""Bytes kept per row over the fused step's: peaks of 21.07 and 18.93 GB at 512 and 256 rows of Llama-3.1-8B, 8.36 MB a
row against 3.03."""
ADAPTER_BYTES = 16
"""Per trainable parameter: fp32 weight, gradient and two moments."""


@dataclass(frozen=True)
class Solo:
    """Prices configurations alone."""

    setting: SweepSetting

    def gpu_bytes(self, configuration: Configuration, degree: int, num_samples: int) -> float:
        """On each GPU, with so many samples at once, padded to the longest."""
        setting, memory = self.setting, self.setting.memory(degree)
        rows = num_samples * configuration.most_tokens
        parameters = setting.shape.adapter_parameters(configuration.rank, configuration.targets)
        kept = KEPT_TIMES * rows * setting.shape.num_layers * memory.row_bytes(configuration.rank)
        return memory.weight_bytes() + ADAPTER_BYTES * parameters / degree + kept

    def cheapest(self, configuration: Configuration) -> tuple[int, float] | None:
        """The degree that takes the fewest GPU-seconds, and its seconds; None if none holds a single sample.

        Short samples of a large model may fit fewer GPUs, but one at a time; more GPUs can then be cheaper.
        """
        usable = self.setting.usable_bytes
        fitting = [d for d in self.setting.degrees if self.gpu_bytes(configuration, d, 1) <= usable]
        ways = [(degree, self.seconds(configuration, degree)) for degree in fitting]
        return min(ways, key=lambda way: (way[0] * way[1], way[0]), default=None)

    def seconds(self, configuration: Configuration, degree: int) -> float:
        """The whole training on so many GPUs, in the largest microbatches that fit."""
        most = 1
        while (
            most < configuration.batch_size
            and self.gpu_bytes(configuration, degree, most + 1) <= self.setting.usable_bytes
        ):
            most += 1
        passes = -(-configuration.batch_size // most)
        cost = self.setting.step_cost(PackOption(degree, 0, "none"), configuration.rank)
        cost = replace(cost, targets=configuration.targets)
        share, larger = divmod(configuration.batch_size, passes)
        counts = [share + 1] * larger + [share] * (passes - larger)
        times = {
            n: cost.forward_s([configuration.sample_tokens] * n, 0)
            + cost.backward_s([configuration.sample_tokens] * n, 0)
            for n in set(counts)
        }
        launch = LAYER_LAUNCH_S * self.setting.shape.num_layers
        step = sum(max(launch, GPU_TIMES * times[n]) for n in counts) + cost.step_s(0)
        # Evaluations are taken to keep the GPU busy.
        forward = cost.forward_s([configuration.sample_tokens] * most, 0) / (configuration.sample_tokens * most)
        return configuration.num_steps * step + GPU_TIMES * configuration.forward_tokens * forward


def one_by_one_s(configurations: Sequence[Configuration], setting: SweepSetting) -> float | None:
    """The makespan of all of them alone, each on as many GPUs as cost least in all, the longest first.

    None where a configuration does not fit alone, or for a CPU, of which nothing was measured.
    """
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
