"""Predicts what a prepared run will do: its microbatches, how full they are, memory and time.

Memory and time are measured on one real microbatch, the fullest of the plan, and extended to the whole plan. Memory of
the fused step on a CPU, where neither autograd nor an allocator tells, is the memory model's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from weft.engine.engine import Engine
from weft.engine.execute.protocol import MemoryTrial, MicrobatchWork, ReplicaMemoryError
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.progress import PLANNED_BATCHES
from weft.errors import ConfigError
from weft.plan.cost.job_state import kept_bytes, sum_bytes
from weft.plan.pack.planners import ExactPlanner
from weft.plan.program import Turn
from weft.plan.types import Batch, JobQueue, Microbatch

_WEIGHT_BYTES = 8
"""A trainable parameter and its gradient."""

PLANNED_SAMPLES = 4_000
"""Samples of each job that are really planned; longer runs are extended from there."""


@dataclass(frozen=True)
class JobPreview:
    """One job's share of the plan."""

    name: str
    num_steps: int
    num_tokens: int
    num_parameters: int


@dataclass(frozen=True)
class Preview:
    """The plan of a run in figures."""

    jobs: tuple[JobPreview, ...]
    num_microbatches: int
    num_tokens: int
    capacity: int
    backbone_bytes: int
    adapter_bytes: int
    activation_bytes: int
    """Taken by the fullest microbatch: on a CPU what is kept between forward and backward, on a GPU at the peak."""
    is_memory_measured: bool
    """False where activations are an estimate."""
    seconds: float
    """Estimated training time, without evaluation and checkpoints."""

    @property
    def fill(self) -> float:
        """Share of the microbatches' capacity that holds tokens."""
        return self.num_tokens / (self.num_microbatches * self.capacity)

    @property
    def total_bytes(self) -> int:
        """Estimated memory."""
        return self.backbone_bytes + self.adapter_bytes + self.activation_bytes


def preview(engine: Engine) -> Preview:
    """Plans the whole run of the submitted jobs and tries its fullest microbatch; changes no job.

    Microbatches that do not fit the memory are made smaller, as in training.
    """
    jobs = list(engine.jobs.values())
    shares = tuple(_job_preview(job) for job in jobs)
    engine.fit_microbatches()
    microbatches, fullest, tried = _plan_that_fits(engine)
    facts, held_bytes = engine.executor.facts, tried.held_bytes
    is_measured = facts.path == "reference" or facts.works_on
    if not is_measured:
        adapters = [job.spec.adapter for job in jobs]
        held_bytes = engine.executor.activation_bytes(fullest.num_tokens, adapters)
    num_tokens = sum(share.num_tokens for share in shares)
    # A long run goes on as it begins.
    factor = num_tokens / sum(m.num_tokens for m in microbatches)
    return Preview(
        jobs=shares,
        num_microbatches=round(len(microbatches) * factor),
        num_tokens=num_tokens,
        capacity=engine.limits.capacity,
        backbone_bytes=facts.backbone_bytes,
        adapter_bytes=sum(
            round(job.num_parameters * (_WEIGHT_BYTES + kept_bytes(job.spec) + sum_bytes(job.spec))) for job in jobs
        ),
        activation_bytes=held_bytes,
        is_memory_measured=is_measured,
        seconds=factor * tried.seconds * sum(max(m.num_tokens / fullest.num_tokens, 0.1) for m in microbatches),
    )


def _plan_that_fits(engine: Engine) -> tuple[list[Microbatch], Microbatch, MemoryTrial]:
    """The microbatches, the fullest of them, and what that takes."""
    while True:
        microbatches = plan_beginning(engine)
        fullest = max(microbatches, key=lambda m: m.num_tokens)
        with suppress(ReplicaMemoryError):
            return microbatches, fullest, engine.executor.try_out(MicrobatchWork(fullest, engine.row_tile))
        # Not in a handler, which would hold on to the tensors of what failed.
        engine.executor.release_memory()
        if not engine.shrink():
            raise ConfigError(
                f"a microbatch of {engine.limits.capacity} tokens, as the longest sample needs, does not fit the GPU's "
                "memory; lower max_length, set recompute: full, or quantize the backbone.",
                where="capacity",
            )


def plan_beginning(engine: Engine) -> list[Microbatch]:
    """The microbatches of all jobs from the start, program by program, as far as `PLANNED_SAMPLES` samples of each go.

    Programs are made as training makes them (`lookahead.py`): one that is foreseen by the engine's planner, one that is
    not, when a job has just come, without any time for searching. Jobs wait for a place by priority and arrival.
    """
    waiting = deque(sorted((_PreviewedJob.of(job) for job in engine.jobs.values()), key=lambda c: -c.job.spec.priority))
    arrivals = list(engine.jobs)
    running: list[_PreviewedJob] = []
    found: list[Microbatch] = []
    while waiting or running:
        planner = engine.planner
        while waiting and (engine.max_jobs is None or len(running) < engine.max_jobs):
            running.append(waiting.popleft())
            planner = planner.within(0.0) if isinstance(planner, ExactPlanner) else planner
        running.sort(key=lambda course: arrivals.index(course.job.spec.name))
        found += _run_program(running, planner([course.queue() for course in running], engine.limits).turns)
        running = [course for course in running if not course.has_ended]
    return found


def _run_program(running: Sequence[_PreviewedJob], turns: Sequence[Turn]) -> list[Microbatch]:
    """What training would run of a program: all of it, or up to where a job has ended."""
    courses = {course.job.spec.name: course for course in running}
    found: list[Microbatch] = []
    for turn in turns:
        if any(course.has_ended for course in running):
            break
        found += [turn.microbatch] if turn.microbatch.segments else []
        for segment in turn.microbatch.segments:
            courses[segment.job].sample += 1
        for step in turn.steps:
            courses[step.job].take_step()
    return found


@dataclass
class _PreviewedJob:
    """How far a job has come in a plan of its whole run."""

    job: LiveJob
    num_steps: int
    """That are planned."""
    step: int = 0
    sample: int = 0
    """Of the current global batch."""
    num_tokens: int = 0

    @classmethod
    def of(cls, job: LiveJob) -> _PreviewedJob:
        return cls(job, min(job.num_steps, max(1, PLANNED_SAMPLES // job.progress.order.batch_size)))

    @property
    def has_ended(self) -> bool:
        return self.step == self.num_steps

    def queue(self) -> JobQueue:
        """The job's next global batches, as `LiveJob.queue` lists them."""
        job, last = self.job, min(self.num_steps, self.step + PLANNED_BATCHES)
        batches = []
        for step in range(self.step, last):
            first = self.sample if step == self.step else 0
            groups = job.progress.batches.groups(step, first)
            batches.append(Batch(step, first, self._lengths(step)[first:], groups))
        is_all = last == self.num_steps
        return JobQueue(job.spec.name, tuple(batches), is_all, job.spec.priority, self.num_tokens, lane=job.lane)

    def take_step(self) -> None:
        """Counts the tokens of whole global batches, as the job does."""
        self.num_tokens += self.job.progress.batches[self.step].num_tokens
        self.step, self.sample = self.step + 1, 0

    def _lengths(self, step: int) -> tuple[int, ...]:
        return tuple(self.job.progress.batches.lengths(step))


def _job_preview(job: LiveJob) -> JobPreview:
    num_tokens = job.progress.order.num_tokens(job.data.train.group_tokens)
    return JobPreview(job.spec.name, job.num_steps, num_tokens, job.num_parameters)
