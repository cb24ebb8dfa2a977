"""What eight GPUs add to one, predicted: nothing here has run on eight.

sim8_jobs     64 jobs of mixed lengths, from ten minutes to four hours on one GPU, four at a time on each: the predicted
              time on one replica over that on eight (`simulate/placed.py`, with the cost of every move).
sim8_trials   120 configurations of PLoRA's space (batches 1 to 32, ranks 8 to 128, samples of 1,024 tokens) with
              Qwen2.5-7B's shape on H200: the makespan that the packing planner finds for one GPU over that for eight.
sim8          the smaller of both.
"""

from __future__ import annotations

import math
import random

from weft.plan.admit import Applicant, Budget
from weft.plan.cost.published_shapes import find_shape
from weft.plan.cost.shape import ModelShape
from weft.plan.place import Candidate, Replica
from weft.plan.simulate.placed import simulate_placed
from weft.plan.sweep import Configuration, plan_sweep

NUM_GPUS, NUM_JOBS, MAX_JOBS = 8, 64, 4
SHORTEST_S, LONGEST_S = 600.0, 14_400.0
BATCHES, RANKS, NUM_OTHERS = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, 128), 4
"""PLoRA's Table 1; the others are four settings of learning rate and alpha, which change no time."""
NUM_SAMPLES, SAMPLE_TOKENS = 4096, 1024
MODEL, DEVICE = "qwen2.5-7b", "h200"


def measure_eight() -> dict[str, float]:
    """Keys as in `python -m benchmarks replicas --json`."""
    speedups = {"sim8_jobs": jobs_speedup(mixed_jobs()), "sim8_trials": trials_speedup(paper_trials())}
    return {"sim8": min(speedups.values()), **speedups}


def mixed_jobs() -> list[Candidate]:
    """Jobs of lengths that are drawn evenly on a logarithmic scale, in no particular order."""
    drawn = random.Random(0)
    seconds = [math.exp(drawn.uniform(math.log(SHORTEST_S), math.log(LONGEST_S))) for _ in range(NUM_JOBS)]
    return [Candidate(Applicant(f"job{i:02}", i), s) for i, s in enumerate(seconds)]


def jobs_speedup(jobs: list[Candidate]) -> float:
    """Predicted time of jobs on one replica over that on eight."""
    replicas = [Replica(f"gpu{i}", Budget(max_jobs=MAX_JOBS)) for i in range(NUM_GPUS)]
    return simulate_placed(jobs, replicas[:1]).makespan_s / simulate_placed(jobs, replicas).makespan_s


def paper_trials() -> list[Configuration]:
    """The 120 configurations."""
    return [
        Configuration(f"b{batch}-r{rank}-{other}", rank, batch, NUM_SAMPLES // batch, SAMPLE_TOKENS)
        for other in range(NUM_OTHERS)
        for batch in BATCHES
        for rank in RANKS
    ]


def trials_speedup(trials: list[Configuration]) -> float:
    """Makespan of the packing planner's plan for one GPU over that for eight."""
    shape = ModelShape.from_config(find_shape(MODEL).config().to_dict(), MODEL)
    one, eight = (plan_sweep(trials, shape, DEVICE, gpus).makespan_s for gpus in (1, NUM_GPUS))
    return one / eight
