"""What eight GPUs add to one, predicted: nothing here has run on eight.

sim8_jobs     64 jobs of mixed lengths, from ten minutes to four hours on one GPU, four at a time on each: the predicted
              time on one replica over that on eight (`simulate_placed`, with the cost of every move).
sim8_trials   120 configurations of PLoRA's space (batches 1 to 32, ranks 8 to 128, samples of 1,024 tokens) with
              Qwen2.5-7B's shape on H200: the makespan that the packing planner finds for one GPU over that for eight.
sim8          the smaller of both.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.plan.admit import Applicant, Budget
from weft.plan.cost.published_shapes import find_shape
from weft.plan.cost.shape import ModelShape
from weft.plan.place import MOVE_S, Candidate, Replica, place
from weft.plan.sweep import Configuration, plan_sweep

NUM_GPUS, NUM_JOBS, MAX_JOBS = 8, 64, 4
SHORTEST_S, LONGEST_S = 600.0, 14_400.0
BATCHES, RANKS, NUM_OTHERS = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, 128), 4
"""PLoRA's Table 1; the others are four settings of learning rate and alpha, which change no time."""
NUM_SAMPLES, SAMPLE_TOKENS = 4096, 1024
ROUNDING = 1e-9
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


@dataclass(frozen=True)
class PlacedRun:
    """When the jobs would end."""

    ends_s: Mapping[str, float]
    """Of every job, in the order in which they end."""
    num_moves: int

    @property
    def makespan_s(self) -> float:
        """When the last one ends."""
        return max(self.ends_s.values(), default=0.0)


def simulate_placed(
    candidates: Sequence[Candidate], replicas: Sequence[Replica], *, move_s: float = MOVE_S
) -> PlacedRun:
    """The predicted run of all jobs to their end; a PlanError if some never get a seat.

    At the start and whenever a job ends, `plan.place` decides again; in between, the jobs of a replica share its time
    in equal parts. A job that moves needs `move_s` seconds of its new replica more. Nothing else takes time.
    """
    speed = {replica.name: replica.speed for replica in replicas}
    left = {c.job: c for c in candidates}
    ends_s: dict[str, float] = {}
    now_s, num_moves = 0.0, 0
    while left:
        placement = place(list(left.values()), replicas, move_s=move_s)
        if not placement.replica_of:
            raise PlanError(f"no replica can take what is left: {', '.join(sorted(left)[:4])}.", where="replicas")
        num_moves += len(placement.moves)
        moved = {move.job: move_s * speed[move.target] for move in placement.moves}
        left = {job: _seated(c, placement.replica_of.get(job), moved.get(job, 0.0)) for job, c in left.items()}
        num_on = Counter(placement.replica_of.values())
        rates = {job: speed[name] / num_on[name] for job, name in placement.replica_of.items()}
        step_s = min(left[job].seconds_left / rate for job, rate in rates.items())
        now_s += step_s
        for job, rate in rates.items():
            rest_s = left[job].seconds_left - step_s * rate
            if rest_s <= ROUNDING * now_s:
                ends_s[job] = now_s
                del left[job]
            else:
                left[job] = replace(left[job], seconds_left=rest_s)
    return PlacedRun(ends_s, num_moves)


def _seated(candidate: Candidate, name: str | None, extra_s: float) -> Candidate:
    return replace(candidate, replica=name, seconds_left=candidate.seconds_left + extra_s)
