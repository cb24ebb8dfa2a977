"""How long it takes to place jobs over replicas, and what eight GPUs add to one, predicted.

place_1000_s       1,000 jobs over 64 replicas, the slowest of three decisions: all jobs are new; some have ended, as
                   many have come, a replica is lost and one drains; the same where memory is too small for all jobs.
place_1000_ratio   the first one's makespan over the larger of two bounds that none can beat: the work of all replicas,
                   and the longest job.

Predicted; nothing here has run on eight GPUs:

sim8_jobs     64 jobs of mixed lengths, from ten minutes to four hours on one GPU, four at a time on each: the predicted
              time on one replica over that on eight (`simulate_placement`, with the cost of every move).
sim8_trials   120 configurations of PLoRA's space (batches 1 to 32, ranks 8 to 128, samples of 1,024 tokens) with
              Qwen2.5-7B's shape on H200: the makespan that the packing planner finds for one GPU over that for eight.
sim8          the smaller of both.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.replicas.placement_check import violations
from weft.errors import PlanError
from weft.plan.admit import Applicant, Budget
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.place import MOVE_S, Candidate, JobPlacement, Replica, assign_jobs
from weft.plan.sweep import Configuration, plan_sweep

NUM_JOBS, NUM_REPLICAS, MAX_JOBS = 1000, 64, 32
JOB_BYTES = (1, 9)
"""Memory of a job, in units of which a replica has 100, or 60 where that is too little for all."""
PLENTY, SCARCE = 100, 60
REPEATS = 3
"""Of every decision; other programs on the machine can only add to a time."""


def measure_placing(num_jobs: int = NUM_JOBS, num_replicas: int = NUM_REPLICAS) -> dict[str, float]:
    """Keys as in `python -m benchmarks replicas --json`."""
    times = []
    ratio = 0.0
    for memory in (PLENTY, SCARCE):
        drawn = random.Random(0)
        replicas = [Replica(f"r{i:02}", Budget(memory, max_jobs=MAX_JOBS)) for i in range(num_replicas)]
        jobs = _jobs(drawn, 0, num_jobs)
        first, first_s = _timed(jobs, replicas)
        if memory == PLENTY:
            least_s = max(sum(c.seconds_left for c in jobs) / num_replicas, max(c.seconds_left for c in jobs))
            ratio = first.makespan_s / least_s
            times.append(first_s)
        jobs = [replace(c, replica=first.replica_of.get(c.job)) for c in jobs if drawn.random() < 0.9]
        jobs += _jobs(drawn, num_jobs, num_jobs - len(jobs))
        replicas = [replace(replicas[1], is_draining=True), *replicas[2:]]
        times.append(_timed(jobs, replicas)[1])
    return {"place_1000_s": max(times), "place_1000_ratio": ratio}


def _timed(jobs: Sequence[Candidate], replicas: Sequence[Replica]) -> tuple[JobPlacement, float]:
    """A placement, and the least time that it took."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        placement = assign_jobs(jobs, replicas)
        times.append(time.perf_counter() - began)
    assert not violations(placement, jobs, replicas)
    return placement, min(times)


def _jobs(drawn: random.Random, first: int, count: int) -> list[Candidate]:
    """Jobs of a quarter of an hour in the median, some much longer; three priorities, four tenants."""
    return [
        Candidate(
            Applicant(f"job{i:04}", i, drawn.randint(*JOB_BYTES), drawn.randint(0, 2), drawn.choice("abcd")),
            drawn.lognormvariate(6.8, 1.0),
        )
        for i in range(first, first + count)
    ]


NUM_GPUS, NUM_SIMULATED, MAX_SIMULATED = 8, 64, 4
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
    seconds = [math.exp(drawn.uniform(math.log(SHORTEST_S), math.log(LONGEST_S))) for _ in range(NUM_SIMULATED)]
    return [Candidate(Applicant(f"job{i:02}", i), s) for i, s in enumerate(seconds)]


def jobs_speedup(jobs: list[Candidate]) -> float:
    """Predicted time of jobs on one replica over that on eight."""
    replicas = [Replica(f"gpu{i}", Budget(max_jobs=MAX_SIMULATED)) for i in range(NUM_GPUS)]
    return simulate_placement(jobs, replicas[:1]).makespan_s / simulate_placement(jobs, replicas).makespan_s


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
class PlacementRun:
    """When the jobs would end."""

    ends_s: Mapping[str, float]
    """Of every job, in the order in which they end."""
    num_moves: int

    @property
    def makespan_s(self) -> float:
        """When the last one ends."""
        return max(self.ends_s.values(), default=0.0)


def simulate_placement(
    candidates: Sequence[Candidate], replicas: Sequence[Replica], *, move_s: float = MOVE_S
) -> PlacementRun:
    """The predicted run of all jobs to their end; a PlanError if some never get a seat.

    At the start and whenever a job ends, `assign_jobs` decides again; in between, the jobs of a replica share its time
    in equal parts. A job that moves needs `move_s` seconds of its new replica more. Nothing else takes time.
    """
    speed = {replica.name: replica.speed for replica in replicas}
    left = {c.job: c for c in candidates}
    ends_s: dict[str, float] = {}
    now_s, num_moves = 0.0, 0
    while left:
        placement = assign_jobs(list(left.values()), replicas, move_s=move_s)
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
    return PlacementRun(ends_s, num_moves)


def _seated(candidate: Candidate, name: str | None, extra_s: float) -> Candidate:
    return replace(candidate, replica=name, seconds_left=candidate.seconds_left + extra_s)
