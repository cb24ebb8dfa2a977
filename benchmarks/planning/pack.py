"""Measures packing: time, microbatches above the lower bound, and the share of rounds proven optimal."""

from __future__ import annotations

import time

from benchmarks.pipeline.lengths import MIXES, queues
from weft.plan.cost.types import LinearCost
from weft.plan.pack.rounds import pack_rounds
from weft.plan.pack.types import RoundLimits

PROFILE = LinearCost(fixed_s=1e-3, token_s=8e-6, pair_s=1.3e-10)
"""About a quarter of an 8B model on one GPU: 16 GFLOP and 0.26 MFLOP per token of context, at 500 TFLOP/s."""


def measure_pack(
    num_samples: int = 25_600, global_batch: int = 16, capacity: int = 8192, padding_multiple: int = 1
) -> dict[str, float]:
    """Packs four jobs of unlike lengths for four stages; keys as in `python -m benchmarks planning --json`."""
    jobs = queues(MIXES[-1], num_samples, global_batch)
    limits = RoundLimits(capacity, 4, padding_multiple)
    began = time.perf_counter()
    plan = pack_rounds(jobs, limits, cost=PROFILE)
    took = time.perf_counter() - began
    return {
        f"pack_s_{num_samples}": took,
        "pack_over_lower_bound": plan.over_lower_bound,
        "pack_proven_share": plan.proven_share,
        "pack_fewest_share": plan.fewest_share,
        "pack_fill": plan.fill,
        "pack_noops": float(plan.num_noops),
    }
