"""A 70B backbone on four H100, four unlike jobs: Weft's programs beside 1F1B and mLoRA, simulated.

sim70b_vs_1f1b    makespan of the jobs one after another, each by 1F1B with 4 samples per microbatch and equal stages,
                  over that of Weft's programs, planned one after another as `weft train` does
sim70b_vs_mlora   the same with LoRAPP: all jobs fill one pipe, 4 samples of one job per microbatch, equal stages
sim70b_vs_…_rows  both with Weft computing single rows as its peers do: schedules and packing alone, like for like
sim70b_vs_…_bound what that could be at most: Weft's work at single rows, no stage ever idle, all stages equal
sim70b_vs_…_torch the first two against peers with plain torch LoRA, which is what they run: their time is longer by
                  what PEFT's adapters were measured to cost on the 8B shape, less what Weft's do (`torch_lora`)

All have the same seconds per layer, and none pads: LoRAFusion's baselines pack samples. Where a profile is given,
these are measured: those of an 8B backbone on one H200, each term taken as many times as the 70B layers have more of
what it counts (weights, attention, adapters, layers); an H100 is taken to compute like an H200. Otherwise the hardware
table's. Every layer is run forward again on its way back, since four microbatches would not fit otherwise. In the first
two peers compute single rows, and Weft whole tiles, as it does. Links are assumed: the hardware table's values for
NVLink (`sim70b_link_gb_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.pipeline.four_jobs import (
    BATCH,
    CAPACITY,
    MIXES,
    NUM_LAYERS,
    NUM_SAMPLES,
    NUM_STAGES,
    SAMPLES_PER_MICROBATCH,
    Executed,
    by_samples,
    execute,
    queues,
)
from weft.plan.choose_layout import split_layers
from weft.plan.cost.analytic import BackboneSetup
from weft.plan.cost.fit import Fit
from weft.plan.cost.hardware import GB, find_hardware
from weft.plan.cost.profile import Profile, ProfiledCost, Setup
from weft.plan.cost.shape import ModelShape, find_shape, gpu_row_tile
from weft.plan.cost.types import CostModel
from weft.plan.pipeline.build import Schedule, build
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.interpret import simulate
from weft.plan.types import JobQueue, Limits

MODEL, DEVICE, RANK = "llama-3.1-70b", "h100", 16
PASSES = ("forward_s", "backward_s")
MEASURED = "llama-3.1-8b"
TORCH_LORA = 11218 / 8811 - 1
"""What adapters add to the frozen model's time with PEFT on one H200, rank 16: `hf_frozen_512to1024_tok_s` over
`peft_best_512to1024_tok_s` in benchmarks/h200.json."""
WEFT_LORA = 0.09751
"""The same with Weft's kernels and four adapters: `overhead4` there."""


def measure_seventy(profile: Profile | None = None, num_samples: int = NUM_SAMPLES) -> dict[str, float]:
    """Keys as in `python -m benchmarks pipeline --json`."""
    jobs = queues(MIXES[-1], num_samples, BATCH)
    ours, single_rows = (_ours(jobs, profile, tile) for tile in (gpu_row_tile(CAPACITY, _shape().hidden), 1))
    bound_s = single_rows.busy_s / NUM_STAGES
    found = {}
    for name, schedule in (("1f1b", Schedule.ONE_F_ONE_B), ("mlora", Schedule.LORAPP)):
        peer_s = _peer_s(schedule, jobs, profile)
        found[f"sim70b_vs_{name}"] = peer_s / ours.makespan_s
        found[f"sim70b_vs_{name}_rows"] = peer_s / single_rows.makespan_s
        found[f"sim70b_vs_{name}_bound"] = peer_s / bound_s
        found[f"sim70b_vs_{name}_torch"] = torch_lora() * peer_s / ours.makespan_s
    return found | {"sim70b_link_gb_s": find_hardware(DEVICE).link_rate / GB}


def torch_lora() -> float:
    """How much longer a peer's passes take with torch LoRA in place of Weft's kernels.

    Adapters were measured on the 8B shape; beside the wider products of a 70B layer they weigh less.
    """
    weighs = _adapter_share(_shape()) / _adapter_share(_shape(MEASURED))
    return (1 + weighs * TORCH_LORA) / (1 + weighs * WEFT_LORA)


def _shape(name: str = MODEL) -> ModelShape:
    return ModelShape.from_config(find_shape(name).config().to_dict(), name)


def _adapter_share(shape: ModelShape) -> float:
    """Width of a layer's adapters over its weights."""
    return shape.adapter_parameters(1) / (shape.num_layers * shape.layer_weights)


def _ours(jobs: Sequence[JobQueue], profile: Profile | None, row_tile: int) -> Executed:
    """Weft's programs where rows are computed in such tiles."""
    one_by_one = _cost(profile, NUM_LAYERS, row_tile=row_tile)
    layers_s = [one_by_one.forward_s([CAPACITY], i) + one_by_one.backward_s([CAPACITY], i) for i in range(NUM_LAYERS)]
    split = split_layers(layers_s, NUM_STAGES)
    cost = _cost(profile, NUM_STAGES, row_tile=row_tile, split=split)
    return execute(FastestPipeline(NUM_STAGES, cost, row_tile=row_tile), jobs, Limits(CAPACITY), cost)


def _peer_s(schedule: Schedule, jobs: Sequence[JobQueue], profile: Profile | None) -> float:
    cost = _cost(profile, NUM_STAGES, row_tile=1)
    program = build(schedule, by_samples(jobs, SAMPLES_PER_MICROBATCH), NUM_STAGES, cost=cost)
    return simulate(program, cost).makespan_s


def _cost(
    profile: Profile | None, num_stages: int, *, row_tile: int, split: tuple[int, ...] | None = None
) -> CostModel:
    shape = _shape()
    if profile is None:
        setup = BackboneSetup(shape, (RANK,) * 4, recompute="full")
        return setup.cost(find_hardware(DEVICE), num_stages, row_tile=row_tile, split=split)
    return ProfiledCost(scaled(profile, shape, row_tile), num_stages, RANK, num_jobs=4, split=split)


def scaled(profile: Profile, shape: ModelShape, row_tile: int) -> Profile:
    """A profile's prediction for a larger backbone; every layer is run forward again on its way back."""
    setup = replace(
        profile.setup,
        device=DEVICE,
        model=MODEL,
        hidden=shape.hidden,
        num_layers=shape.num_layers,
        layer_weights=shape.layer_weights,
        head_weights=shape.head_weights,
        layer_adapter_width=shape.adapter_parameters(1) // shape.num_layers,
        row_tile=row_tile,
    )
    layers = setup.num_layers / profile.setup.num_layers
    factors = {
        "fixed": layers,
        "rows": _all_weights(setup) / _all_weights(profile.setup),
        # Attention is as wide as the hidden states in both.
        "pairs": layers * setup.hidden / profile.setup.hidden,
        "rank_tokens": layers * setup.layer_adapter_width / profile.setup.layer_adapter_width,
        "jobs": layers * setup.layer_adapter_width / profile.setup.layer_adapter_width,
    }
    forward, backward = ({t: p * factors[t] for t, p in profile.fits[name].prices.items()} for name in PASSES)
    again = {term: price + forward[term] for term, price in backward.items()}
    return replace(profile, setup=setup, fits={**profile.fits, "forward_s": Fit(forward), "backward_s": Fit(again)})


def _all_weights(setup: Setup) -> int:
    return setup.num_layers * setup.layer_weights + setup.head_weights
