"""What a controller knows of jobs and ranks in other processes, and which rank is to train which job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.dataset import JobData
from weft.engine.events import (
    CheckpointSaved,
    EvalDone,
    JobEnded,
    JobEvent,
    JobFailed,
    JobPaused,
    JobStarted,
    MicrobatchDone,
    StepDone,
)
from weft.engine.jobs.live_job import LiveJob
from weft.job_state import JobState, Reason, ReasonCode
from weft.parallel.replicas.connections import RankHandle
from weft.parallel.replicas.messages import JobOrder, JobView, RankReady
from weft.plan.admit import Applicant, Budget, Share
from weft.plan.place import Candidate, JobPlacement, Replica, assign_jobs
from weft.spec import JobSpec

if TYPE_CHECKING:
    from weft.engine.execute.protocol import ReplicaFacts


@dataclass
class JobRecord:
    order: JobOrder
    data: JobData
    arrival: int
    num_steps: int
    longest: int
    num_parameters: int = 0
    num_bytes: int = 0
    notes: tuple[str, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    state: JobState = JobState.QUEUED
    reason: Reason | None = None
    step: int = 0
    saved_step: int = 0
    num_tokens: int = 0
    best_eval: float | None = None
    has_started: bool = False
    hold_step: int | None = None
    rank: int | None = None
    is_leaving: bool = False
    wait_reported: bool = False
    is_parked: bool = False
    is_cancelled: bool = False
    shown_step: int = 0
    may_end: bool = False
    has_best: bool = False

    @classmethod
    def of(cls, order: JobOrder, data: JobData, arrival: int) -> JobRecord:
        plan = LiveJob(order.spec, data)
        return cls(order, data, arrival, plan.num_steps, plan.longest)

    @property
    def spec(self) -> JobSpec:
        return self.order.spec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_short_of_storage(self) -> bool:
        return self.reason is not None and self.reason.code is ReasonCode.STORAGE

    @property
    def wants_rank(self) -> bool:
        return self.state in (JobState.QUEUED, JobState.RUNNING)

    @property
    def is_held(self) -> bool:
        return self.hold_step is not None and self.step >= self.hold_step

    @property
    def tokens_left(self) -> float:
        mean = self.data.train.summary.num_tokens / max(1, self.data.train.num_groups)
        return (self.num_steps - self.step) * self.spec.batch_size * mean

    @property
    def applicant(self) -> Applicant:
        return Applicant(self.name, self.arrival, self.num_bytes, self.spec.priority, self.spec.tenant)

    def rank_lost(self, step: int) -> None:
        """Takes the job off its lost rank. It continues from this step on another one, unless it has ended or is
        paused."""
        self.rank, self.is_leaving = None, False
        if self.state in (JobState.RUNNING, JobState.QUEUED):
            self.state, self.step = JobState.PAUSED if self.is_parked else JobState.QUEUED, step

    def show(self, view: JobView) -> None:
        self.shown_step, self.may_end, self.has_best = view.step, view.may_end, view.has_best

    def update(self, event: JobEvent, view: JobView | None = None) -> None:
        if view is not None:
            self.num_tokens = view.num_tokens
        match event:
            case JobStarted(_, step):
                self.state, self.reason, self.step, self.saved_step = JobState.RUNNING, None, step, step
                self.has_started, self.wait_reported = True, False
            case StepDone():
                self.step, self.num_tokens = event.step, event.num_tokens
            case EvalDone() if event.is_best:
                self.best_eval = event.eval_loss
            case CheckpointSaved():
                self.saved_step = event.step
            case JobPaused():
                self.state, self.reason, self.step = JobState.PAUSED, event.reason, event.step
                self.is_leaving = False
            case JobEnded():
                self.state, self.step, self.is_leaving = event.state, event.step, False
                self.reason = event.reason if isinstance(event, JobFailed) else None


FIRST_PACE = 10_000.0
"""Assumed tokens per second of a replica before any measurement."""


@dataclass
class RankRecord:
    process: RankHandle
    ready: RankReady | None = None
    permit: Path | None = None
    """File that permits the rank to write into the run directory, as long as it exists."""
    num_restarts: int = 0
    max_jobs: int | None = None
    num_tokens: int = 0
    seconds: float = 0.0
    is_idle: bool = True
    is_ending: bool = False
    failure: str | None = None

    @property
    def index(self) -> int:
        return self.process.index

    @property
    def facts(self) -> ReplicaFacts:
        assert self.ready is not None, "it is still being loaded"
        return self.ready.facts

    def learn(self, event: MicrobatchDone) -> None:
        self.num_tokens += event.tokens
        self.seconds += event.seconds

    def replica(self, speed: float) -> Replica:
        """The rank for the placement planner; one that is loading takes no jobs yet."""
        if self.ready is None:
            return Replica(str(self.index), Budget(), is_draining=True)
        limits = [limit for limit in (self.ready.budget.max_jobs, self.max_jobs) if limit is not None]
        budget = replace(self.ready.budget, max_jobs=min(limits, default=None))
        return Replica(str(self.index), budget, speed)


def decide(
    jobs: Sequence[JobRecord], ranks: Sequence[RankRecord], weights: Mapping[str, float], homes: Mapping[str, int]
) -> JobPlacement:
    """`homes`: the ranks that jobs are planned on, for those without a rank."""
    seconds, tokens = sum(rank.seconds for rank in ranks), sum(rank.num_tokens for rank in ranks)
    pace = tokens / seconds if seconds else FIRST_PACE
    candidates = [
        Candidate(job.applicant, job.tokens_left / pace, _name(job.rank), _name(homes.get(job.name)))
        for job in jobs
        if job.wants_rank
    ]
    served: dict[str, int] = {}
    for job in jobs:
        served[job.spec.tenant] = served.get(job.spec.tenant, 0) + job.num_tokens
    shares = {tenant: Share(weights.get(tenant, 1.0), tokens) for tenant, tokens in served.items()}
    speeds = _speeds(ranks, pace)
    return assign_jobs(candidates, [rank.replica(speed) for rank, speed in zip(ranks, speeds, strict=True)], shares)


def _name(rank: int | None) -> str | None:
    return None if rank is None else str(rank)


def _speeds(ranks: Sequence[RankRecord], pace: float) -> list[float]:
    """Relative speed of each rank, 1 on average: predicted for unlike replicas, measured for unlike devices."""
    ready = [rank.ready for rank in ranks if rank.ready is not None]
    if len({own.facts.layout for own in ready}) > 1:
        mean = sum(own.speed for own in ready) / len(ready)
        return [1.0 if rank.ready is None else rank.ready.speed / mean for rank in ranks]
    are_alike = len({str(own.facts.environment.get("device")) for own in ready}) == 1
    return [1.0 if are_alike or not rank.seconds else rank.num_tokens / rank.seconds / pace for rank in ranks]
