"""What a run will do, before it runs: its next global batches planned, simulated, and drawn out to its end.

One stage is planned by the engine's own planner; several by the fastest pipeline found (`simulate/choose.py`). Time
comes from the cost model, memory from the memory model; what follows the planned global batches is taken to go on at
the same rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.cost.analytic import AnalyticCost
from weft.cost.types import CostModel
from weft.plan.group import JobLengths, group_jobs
from weft.plan.pack.types import RoundLimits
from weft.plan.types import JobQueue, Limits, Microbatch, Planner
from weft.simulate.choose import best_pipeline
from weft.simulate.interpret import simulate
from weft.simulate.timeline import Timeline

ALL = 10**9


@dataclass(frozen=True)
class JobOutline:
    """A job as a forecast needs it."""

    queue: JobQueue
    """Its next global batches."""
    num_steps: int
    num_tokens: int
    """Of the whole job."""
    rank: int

    @property
    def lengths(self) -> list[int]:
        """Of the samples in the queue."""
        return [length for batch in self.queue.batches for length in batch.lengths]


@dataclass(frozen=True)
class Forecast:
    """A plan and what it is expected to do."""

    jobs: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    """Jobs that take turns in a pipeline; one group on one stage."""
    num_stages: int
    schedule: str
    num_microbatches: int
    fewest_microbatches: int
    """Lower bound: what the tokens and the steps between global batches need."""
    fill: float
    """Of the microbatches' capacity."""
    planned_tokens: int
    planned_s: float
    bubble_ratio: float
    total_tokens: int
    total_s: float
    """Of the whole run, at the planned part's rate."""
    stage_bytes: tuple[int, ...]
    """Memory of each stage at its fullest."""
    device_bytes: int
    keeps_order: bool
    """True if every job's samples run in its own order: then its bits do not depend on the plan."""

    @property
    def tokens_per_s(self) -> float:
        """Of the planned part."""
        return self.planned_tokens / self.planned_s if self.planned_s else 0.0

    @property
    def fits(self) -> bool:
        """Every stage has room."""
        return max(self.stage_bytes) <= self.device_bytes

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s, "fits": self.fits}


def forecast(
    jobs: Sequence[JobOutline],
    capacity: int,
    cost: AnalyticCost,
    planner: Planner,
    measured: CostModel | None = None,
) -> tuple[Forecast, Timeline]:
    """The forecast of a run on `cost.num_stages` stages, and the simulated timeline of its planned part.

    Time comes from `measured` where it is given, memory from `cost`.
    """
    queues = [job.queue for job in jobs]
    times = measured or cost
    if cost.num_stages == 1:
        program = planner(queues, Limits(capacity, max_microbatches=ALL))
        timeline = simulate(program, times)
        microbatches: Sequence[Microbatch] = program.microbatches
        schedule, keeps_order, num_held = "one stage", True, [1]
        # A job's next global batch waits for its step, so each needs a microbatch of its own.
        fewest = max(len(queue.batches) for queue in queues)
    else:
        limits = RoundLimits(capacity, cost.num_stages)
        best = best_pipeline(queues, limits, times)
        timeline, schedule = best.timeline, str(best.schedule)
        microbatches = [m for m in best.rounds.stream if m.segments]
        keeps_order, fewest = best.rounds.keeps_order, best.rounds.fewest
        num_held = [_held(timeline, stage) for stage in range(cost.num_stages)]
    tokens = sum(m.num_tokens for m in microbatches)
    total = sum(job.num_tokens for job in jobs)
    ranks, memory = [job.rank for job in jobs], cost.memory
    rows = max(cost.rows([s.length for s in m.segments]) for m in microbatches)
    found = Forecast(
        tuple(queue.job for queue in queues),
        _groups(jobs, cost.num_stages),
        cost.num_stages,
        schedule,
        len(microbatches),
        max(fewest, -(-tokens // capacity)),
        tokens / (len(microbatches) * capacity),
        tokens,
        timeline.makespan_s,
        timeline.bubble_ratio(),
        total,
        timeline.makespan_s * total / tokens,
        tuple(memory.total_bytes(rows, ranks, stage=s, num_held=n) for s, n in enumerate(num_held)),
        cost.hardware.memory_bytes,
        keeps_order,
    )
    return found, timeline


def _held(timeline: Timeline, stage: int) -> int:
    """Most microbatches that a stage has between forward and backward."""
    held = most = 0
    for span in timeline.spans:
        if span.stage == stage and span.name in ("forward", "backward"):
            held += 1 if span.name == "forward" else -1
            most = max(most, held)
    return max(most, 1)


def _groups(jobs: Sequence[JobOutline], num_stages: int) -> tuple[tuple[str, ...], ...]:
    if num_stages == 1 or len(jobs) < 2:
        return (tuple(job.queue.job for job in jobs),)
    outlines = [
        JobLengths(job.queue.job, sum(job.lengths) / len(job.lengths), len(job.queue.batches[0].lengths))
        for job in jobs
    ]
    return group_jobs(outlines, max(1, len(jobs) // 2)).groups
