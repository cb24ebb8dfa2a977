"""Forecast of a run: its next global batches are planned, simulated, and extrapolated to its end.

The planner is the one that trains the run. Time comes from the cost model, memory from the memory model, or both from a
profile; later global batches are assumed to go on at the same rate, and evaluations are added. Several replicas are in
`layout_forecast.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.plan.admit import MARGIN, Budget
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.memory import MemoryModel, StateBytes, job_bytes
from weft.plan.cost.profile import ProfiledCost
from weft.plan.cost.types import CostModel
from weft.plan.layout import stage_names
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.planner import PairChoice, Planner
from weft.plan.program import Program
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.interpret import simulate, simulate_turns
from weft.plan.simulate.timeline import Timeline
from weft.plan.types import JobQueue, Limits, Microbatch

ALL = 10**9
ROW_TILE = 64
"""Number of rows of which the largest capacity is a multiple."""


@dataclass(frozen=True)
class JobOutline:
    queue: JobQueue
    num_steps: int
    num_tokens: int
    cost_rank: int
    """Rank that the cost models count for its adapter."""
    rank: int | None = None
    forward_tokens: int = 0
    """Tokens run forward only, by all of its evaluations and its reference passes."""
    state: StateBytes = StateBytes()
    num_trained_rows: int = 0
    """Rows of the embedding and the output head that it trains."""
    is_any_order: bool = False
    """True if its sums do not depend on the order, so that replicas may share its samples."""
    num_parameters: int | None = None
    """Parameters of its adapter; None: those of a LoRA of `cost_rank` on all linears."""
    experts: str = ""
    """Words about how the job trains routed experts; empty if they are frozen."""


@dataclass(frozen=True)
class Forecast:
    jobs: tuple[JobOutline, ...]
    groups: tuple[tuple[str, ...], ...]
    device: str
    num_stages: int
    stage_layers: tuple[int, ...]
    capacity: int
    schedule: str
    program: Program
    timeline: Timeline
    eval_s: float
    stage_bytes: tuple[int, ...]
    device_bytes: int
    largest_capacity: int
    """Tokens of the largest microbatch that fits, by the memory model; 0: none does."""
    keeps_order: bool
    """True if every job's samples run in its own order, so that its bits do not depend on the plan."""
    trained_rows_bytes: int = 0
    tensor_parallel: int = 1
    pairs: PairChoice | None = None
    """The decision about microbatches side by side; None where they are not possible."""

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.tensor_parallel

    @property
    def num_microbatches(self) -> int:
        return sum(bool(m.segments) for m in self.program.microbatches)

    @property
    def planned_tokens(self) -> int:
        return sum(m.num_tokens for m in self.program.microbatches)

    @property
    def total_tokens(self) -> int:
        return sum(job.num_tokens for job in self.jobs)

    @property
    def num_rounds(self) -> int:
        return max(len(job.queue.batches) for job in self.jobs)

    @property
    def fewest_microbatches(self) -> int:
        """Lower bound: by tokens, and by the global batches of a job, each of which waits for the step before."""
        return max(self.num_rounds, -(-self.planned_tokens // self.capacity))

    @property
    def fill(self) -> float:
        """Share of the microbatches' capacity that holds tokens."""
        return self.planned_tokens / (self.num_microbatches * self.capacity)

    @property
    def stage_names(self) -> list[str]:
        sizes = self.program.replica_sizes or (self.num_stages,)
        return stage_names(sizes, self.program.shards)

    @property
    def planned_s(self) -> float:
        return self.timeline.makespan_s

    @property
    def round_s(self) -> float:
        return self.planned_s / self.num_rounds

    @property
    def bubble_ratio(self) -> float:
        return self.timeline.bubble_ratio()

    @property
    def total_s(self) -> float:
        """Seconds of the whole run at the planned part's rate, with evaluations and reference passes."""
        return self.planned_s * self.total_tokens / self.planned_tokens + self.eval_s

    @property
    def tokens_per_s(self) -> float:
        return self.planned_tokens / self.planned_s if self.planned_s else 0.0

    @property
    def fits(self) -> bool:
        return max(self.stage_bytes) <= self.device_bytes

    def group_of(self, job: str) -> int:
        return next(number for number, names in enumerate(self.groups, start=1) if job in names)

    def to_json(self) -> dict[str, Any]:
        hidden = ("jobs", "program", "timeline", "pairs")
        figures = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in hidden}
        derived = (
            *("num_microbatches", "fewest_microbatches", "fill", "planned_tokens", "num_rounds", "total_tokens"),
            *("num_devices", "planned_s", "round_s", "bubble_ratio", "total_s", "tokens_per_s", "fits"),
        )
        jobs = [
            {
                "name": job.queue.job,
                "group": self.group_of(job.queue.job),
                "num_steps": job.num_steps,
                "num_tokens": job.num_tokens,
                "rank": job.rank,
                "experts": job.experts or None,
                "num_parameters": job.num_parameters,
            }
            for job in self.jobs
        ]
        return {
            "jobs": jobs,
            **figures,
            **{name: getattr(self, name) for name in derived},
            "pairs": None if self.pairs is None else asdict(self.pairs),
            "program": self.program.to_json(),
            "timeline": [asdict(span) for span in self.timeline.spans],
        }


def forecast(
    jobs: Sequence[JobOutline],
    capacity: int,
    cost: AnalyticCost,
    planner: Planner,
    measured: ProfiledCost | None = None,
) -> Forecast:
    """The forecast of a run on `cost.num_stages` stages. With `measured`, time and the memory of a single stage come
    from it; otherwise both come from `cost`."""
    queues, ranks = [job.queue for job in jobs], [job.cost_rank for job in jobs]
    times, pairs, keeps_order = measured or cost, None, True
    schedule = planner.schedule if isinstance(planner, PipelinePlanner) else Schedule.EAGER
    in_flight = in_flight_of(jobs, capacity, cost, cost.memory) if cost.num_stages > 1 else ()
    limits = Limits(capacity, max_microbatches=ALL, row_tile=cost.row_tile, in_flight=in_flight)
    if isinstance(planner, FastestPipeline) and planner.pairs is not None:
        choice = planner.choose(queues, limits)
        program, pairs = choice.program, choice.pairs
        timeline = simulate(program, times, pairs=planner.pairs)
    elif cost.num_stages == 1:
        program = planner(queues, limits)
        timeline = simulate_turns(program, times)
    else:
        keeps_order = not any(job.is_any_order for job in jobs)
        program = planner([replace(job.queue, home=None if job.is_any_order else 0) for job in jobs], limits)
        timeline = simulate(program, times)
    microbatches = [m for m in program.microbatches if m.segments]
    num_held = [most_held(timeline, stage) for stage in range(cost.num_stages)]
    return Forecast(
        jobs=tuple(jobs),
        groups=groups_of([queue.job for queue in queues], microbatches),
        device=cost.hardware.name,
        num_stages=cost.num_stages,
        stage_layers=tuple(cost.memory.layers(stage) for stage in range(cost.num_stages)),
        capacity=capacity,
        schedule="one stage" if cost.num_stages == 1 else str(schedule),
        program=program,
        timeline=timeline,
        eval_s=sum(forward_s(job, capacity, times, cost.num_stages) for job in jobs),
        stage_bytes=_stage_bytes(jobs, microbatches, cost, measured, num_held),
        device_bytes=cost.hardware.memory_bytes,
        largest_capacity=min(
            cost.memory.most_rows(
                cost.hardware.memory_bytes - unusual_bytes(jobs, cost, stage), ranks, ROW_TILE, stage, held
            )
            for stage, held in enumerate(num_held)
        ),
        keeps_order=keeps_order,
        trained_rows_bytes=sum(trained_rows_bytes(job, cost) for job in jobs),
        tensor_parallel=cost.tensor_parallel,
        pairs=pairs,
    )


def forward_s(job: JobOutline, capacity: int, times: CostModel, num_stages: int) -> float:
    """Seconds of a job's forward-only tokens in full microbatches of mean length, through all stages."""
    lengths = [length for batch in job.queue.batches for length in batch.lengths]
    mean = max(1, sum(lengths) // len(lengths))
    full = [mean] * (capacity // mean)
    slowest = max(times.forward_s(full, stage) for stage in range(num_stages))
    return job.forward_tokens / sum(full) * slowest


def unusual_bytes(jobs: Sequence[JobOutline], cost: AnalyticCost, stage: int) -> int:
    """Bytes of the jobs on a stage that differ from the memory model, of linear adapters with AdamW; may be
    negative."""
    memory = cost.memory
    found = (memory.unlike_bytes(job.cost_rank, job.num_parameters, job.state, stage) for job in jobs)
    return math.ceil(sum(found)) + sum(trained_rows_bytes(job, cost) for job in jobs)


def outline_bytes(job: JobOutline, cost: AnalyticCost) -> int:
    """Bytes of a job's adapter on one device, with gradients and optimizer."""
    own = cost.memory.job_bytes(job.cost_rank, job.num_parameters, job.state)
    return math.ceil(own) + trained_rows_bytes(job, cost)


def num_that_fit(job: JobOutline, capacity: int, cost: AnalyticCost) -> int:
    """Jobs like this one that admission would let train together on one device, beside full microbatches."""
    memory, rows = cost.memory, cost.rows([capacity])
    fixed = memory.total_bytes(rows, [job.cost_rank]) - memory.adapter_bytes(job.cost_rank)
    return Budget(cost.hardware.memory_bytes, fixed, MARGIN).num_alike(outline_bytes(job, cost)) or 0


def trained_rows_bytes(job: JobOutline, cost: AnalyticCost) -> int:
    numbers = job.num_trained_rows * cost.shape.hidden
    return math.ceil(job_bytes(numbers, cost.memory.trained_bytes_each, job.state, cost.tensor_parallel))


def _stage_bytes(
    jobs: Sequence[JobOutline],
    microbatches: Sequence[Microbatch],
    cost: AnalyticCost,
    measured: ProfiledCost | None,
    num_held: Sequence[int],
) -> tuple[int, ...]:
    rank = {job.queue.job: job.cost_rank for job in jobs}
    ranks = list(rank.values())
    if measured is not None and cost.num_stages == 1:
        most = max(measured.total_bytes(_by_job(m, rank), ranks) for m in microbatches)
        return (most + unusual_bytes(jobs, cost, 0),)
    rows = max(cost.rows([s.length for s in m.segments]) for m in microbatches)
    return tuple(
        cost.memory.total_bytes(rows, ranks, stage=stage, num_held=held) + unusual_bytes(jobs, cost, stage)
        for stage, held in enumerate(num_held)
    )


def _by_job(microbatch: Microbatch, rank: dict[str, int]) -> list[tuple[int, list[int]]]:
    return [(rank[job], own) for job, own in microbatch.job_lengths.items()]


def in_flight_of(jobs: Sequence[JobOutline], capacity: int, cost: AnalyticCost, memory: MemoryModel) -> tuple[int, ...]:
    """Full microbatches that each stage has memory for beside these jobs, at least one, as a run counts them."""
    ranks, rows = [job.cost_rank for job in jobs], cost.rows([capacity])
    found = []
    for stage in range(cost.num_stages):
        rest = memory.total_bytes(rows, ranks, stage=stage, num_held=0) + unusual_bytes(jobs, cost, stage)
        each = memory.microbatch_bytes(rows, max(ranks, default=1), stage)
        found.append(max(1, int((cost.hardware.memory_bytes / (1 + MARGIN) - rest) // each)))
    return tuple(found)


def most_held(timeline: Timeline, stage: int) -> int:
    """Maximum number of microbatches that a stage has between forward and backward."""
    held = most = 0
    for span in timeline.spans:
        if span.stage == stage and span.name in ("forward", "backward"):
            held += 1 if span.name == "forward" else -1
            most = max(most, held)
    return max(most, 1)


def groups_of(jobs: Sequence[str], microbatches: Sequence[Microbatch]) -> tuple[tuple[str, ...], ...]:
    group = {job: {job} for job in jobs}
    for microbatch in microbatches:
        members = {s.job for s in microbatch.segments}
        joined = set().union(*(group[job] for job in members))
        group |= dict.fromkeys(joined, joined)
    return tuple(dict.fromkeys(tuple(job for job in jobs if job in group[own]) for own in jobs))
