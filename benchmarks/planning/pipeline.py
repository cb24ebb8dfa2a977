"""Simulated bubbles of pipelines: three published schedules, each with its own microbatches and program, and ours.

Anchors (LoRAFusion, figure 20): four jobs on XSum, CNN/DailyMail, WikiSum and a mixture, 4 stages. 1F1B trains the jobs
one after the other, mLoRA fills the pipe with all four, both with 4 samples per microbatch; LoRAFusion packs groups of
two into 8,192 tokens, greedily and with its merge pass. Its own remark is that most of its bubbles come from the output
head on the last stage, so the head is in the model: 80 layers of a 70B backbone, split evenly for the anchors and by
`split_layers` for ours. Figures are simulated, from a cost model; none of them is a measurement of a GPU.

Ours may reorder samples within a global batch, as LoRAFusion's does, which changes sums by rounding; the figures named
`_in_order` are of plans that keep every job's own order, and with it the bits of its adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.pipeline.four_jobs import (
    BATCH,
    CAPACITY,
    HEAD_LAYERS,
    MIXES,
    NUM_LAYERS,
    NUM_SAMPLES,
    NUM_STAGES,
    SAMPLES_PER_MICROBATCH,
    LayerCost,
    LengthMix,
    by_samples,
    queues,
    split_cost,
)
from benchmarks.planning.best_pipeline import best_pipeline
from weft.plan.pack.lorafusion import pack_groups, pair_head_tail
from weft.plan.pack.types import RoundLimits
from weft.plan.pipeline.build import Schedule, build
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import Timeline
from weft.plan.types import JobQueue, Microbatch


@dataclass(frozen=True)
class Setting:
    """One of the 20 settings, simulated."""

    mix: str
    capacity: int
    global_batch: int
    bubble: float
    ordered_bubble: float
    """With every job in its own order."""
    lorafusion_bubble: float
    makespan_ratio: float
    """Ours over LoRAFusion's greedy."""
    ordered_makespan_ratio: float


def measure_pipeline(num_samples: int = NUM_SAMPLES) -> dict[str, float]:
    """Bubbles of the three anchors and of ours on four heterogeneous jobs."""
    jobs = queues(MIXES[-1], num_samples, BATCH)
    even = LayerCost((NUM_LAYERS // NUM_STAGES,) * NUM_STAGES, HEAD_LAYERS)
    split = split_cost()
    fixed_size = by_samples(jobs, SAMPLES_PER_MICROBATCH)
    packed = lorafusion(jobs, CAPACITY)
    # As much as 1F1B's first stage needs for full microbatches.
    memory = [NUM_STAGES * CAPACITY * layers for layers in split.layers]
    limits = RoundLimits(CAPACITY, NUM_STAGES)
    ours = best_pipeline(jobs, limits, split, memory_bytes=memory)
    ordered = best_pipeline(jobs, limits, split, memory_bytes=memory, keep_order=True)
    return {
        "bubble_1f1b": _run(Schedule.ONE_F_ONE_B, fixed_size, even).bubble_ratio(),
        "bubble_mlora": _run(Schedule.LORAPP, fixed_size, even).bubble_ratio(),
        "bubble_lorafusion": _run(Schedule.MULTI_ADAPTER, packed, even).bubble_ratio(),
        "bubble_het4": ours.timeline.bubble_ratio(),
        "bubble_het4_in_order": ordered.timeline.bubble_ratio(),
    }


def measure_settings() -> list[Setting]:
    """Ours against LoRAFusion's greedy, 5 length mixes × 2 capacities × 2 global batches, on equal stages."""
    return [_setting(mix, capacity, batch) for mix in MIXES for capacity in (8192, 16_384) for batch in (16, 32)]


def summary(settings: Sequence[Setting]) -> dict[str, float]:
    """Worst and mean bubble of the settings, and the worst makespan over that of LoRAFusion's greedy."""
    bubbles, ordered = [s.bubble for s in settings], [s.ordered_bubble for s in settings]
    return {
        "bubble_worst20": max(bubbles),
        "bubble_mean20": sum(bubbles) / len(bubbles),
        "bubble_worst20_in_order": max(ordered),
        "bubble_mean20_in_order": sum(ordered) / len(ordered),
        "makespan_worst20_over_lorafusion": max(s.makespan_ratio for s in settings),
        "makespan_worst20_in_order_over_lorafusion": max(s.ordered_makespan_ratio for s in settings),
    }


def _setting(mix: LengthMix, capacity: int, batch: int) -> Setting:
    cost = LayerCost((NUM_LAYERS // NUM_STAGES,) * NUM_STAGES)
    jobs = queues(mix, NUM_SAMPLES, batch)
    memory = [NUM_STAGES * capacity * layers for layers in cost.layers]
    limits = RoundLimits(capacity, NUM_STAGES)
    ours = best_pipeline(jobs, limits, cost, memory_bytes=memory).timeline
    ordered = best_pipeline(jobs, limits, cost, memory_bytes=memory, keep_order=True).timeline
    theirs = _run(Schedule.MULTI_ADAPTER, lorafusion(jobs, capacity), cost)
    return Setting(
        mix.name,
        capacity,
        batch,
        ours.bubble_ratio(),
        ordered.bubble_ratio(),
        theirs.bubble_ratio(),
        ours.makespan_s / theirs.makespan_s,
        ordered.makespan_s / theirs.makespan_s,
    )


def lorafusion(jobs: Sequence[JobQueue], capacity: int) -> tuple[Microbatch, ...]:
    """LoRAFusion's greedy stream: two groups by head-tail pairing that take turns, merged and with no-ops."""
    return pack_groups(pair_head_tail(jobs, 2), RoundLimits(capacity, NUM_STAGES), keep_order=False)


def _run(schedule: Schedule, microbatches: Sequence[Microbatch], cost: LayerCost) -> Timeline:
    return simulate(build(schedule, microbatches, NUM_STAGES, cost=cost), cost)
