"""How long fusion takes to plan, on tasks like those of the MuxTune paper."""

from __future__ import annotations

import random
import statistics
import time

from weft.plan.cost.types import LinearCost
from weft.plan.fuse import FuseTask, Pipe, fuse

PADDED_LENGTHS = (64, 128, 256)
"""SST2, OpenBookQA and RTE."""
BATCH_SIZES = (2, 4, 8, 16, 32)
NUM_STAGES = 4


def fuse_tasks(num_tasks: int, *, seed: int) -> list[FuseTask]:
    """Tasks with the padded lengths of three data sets and microbatches of 2 to 32 samples."""
    rng = random.Random(seed)
    return [
        FuseTask(
            f"task{i:03d}", (rng.choice(PADDED_LENGTHS),) * rng.choice(BATCH_SIZES), adapter_s=1e-4, adapter_share=0.1
        )
        for i in range(num_tasks)
    ]


def measure_fuse(*, num_tasks: int = 64, repeats: int = 5) -> dict[str, float]:
    """Seconds of one core to fuse 64 tasks on four stages, the median over different tasks."""
    cost = LinearCost(fixed_s=4e-3, token_s=2e-6, pair_s=1e-10, token_bytes=1_000)
    pipe = Pipe(cost, NUM_STAGES, num_microbatches=8)
    times_s = []
    for seed in range(repeats):
        tasks = fuse_tasks(num_tasks, seed=seed)
        begun = time.process_time()
        fuse(tasks, pipe)
        times_s.append(time.process_time() - begun)
    return {"htask64_s": statistics.median(times_s)}
