"""Predicts what a prepared run will do: its microbatches, their fill, memory and time.

Memory and time are measured on one real microbatch, the fullest of the plan, and extrapolated. On a CPU the fused step
shows its memory neither to autograd nor to an allocator, so the memory model's estimate is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from weft.engine.engine import Engine
from weft.engine.execute.protocol import MemoryTrial, MicrobatchExecutor, MicrobatchWork, ReplicaMemoryError
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.progress import PLANNED_BATCHES
from weft.errors import ConfigError
from weft.plan.cost.memory import kept_bytes, sum_bytes
from weft.plan.program import Turn
from weft.plan.types import Batch, JobQueue, Microbatch

PLANNED_SAMPLES = 4_000


@dataclass(frozen=True)
class JobPreview:
    name: str
    num_steps: int
    num_tokens: int
    num_parameters: int
    num_bytes: int
    """Bytes of its adapter, with gradients and optimizer, as admission counts them."""
    experts: str
    """Words about how the job trains routed experts; empty if they are frozen."""
    num_alike: int | None
    """Number of such jobs that fit together; None: any, or it is not known."""


@dataclass(frozen=True)
class Preview:
    jobs: tuple[JobPreview, ...]
    num_microbatches: int
    num_tokens: int
    capacity: int
    backbone_bytes: int
    adapter_bytes: int
    activation_bytes: int
    """Bytes of the fullest microbatch: on a CPU kept between forward and backward, on a GPU at the peak."""
    is_memory_measured: bool
    """False if activations are an estimate."""
    seconds: float

    @property
    def fill(self) -> float:
        return self.num_tokens / (self.num_microbatches * self.capacity)

    @property
    def total_bytes(self) -> int:
        return self.backbone_bytes + self.adapter_bytes + self.activation_bytes


def preview(engine: Engine) -> Preview:
    """Plans the whole run of the submitted jobs and tries its fullest microbatch; changes no job. Microbatches that do
    not fit the memory become smaller, as in training."""
    jobs = list(engine.jobs.values())
    engine.fit_microbatches()
    shares = tuple(_job_preview(engine, job) for job in jobs)
    microbatches, fullest, tried = _plan_that_fits(engine)
    facts, held_bytes = engine.executor.facts, tried.held_bytes
    is_measured = facts.path == "reference" or facts.works_on
    if not is_measured:
        adapters = [job.spec.adapter for job in jobs]
        held_bytes = engine.executor.activation_bytes(fullest.num_tokens, adapters)
    num_tokens = sum(share.num_tokens for share in shares)
    # A long run is assumed to continue as it begins.
    factor = num_tokens / sum(m.num_tokens for m in microbatches)
    return Preview(
        jobs=shares,
        num_microbatches=round(len(microbatches) * factor),
        num_tokens=num_tokens,
        capacity=engine.limits.capacity,
        backbone_bytes=facts.backbone_bytes,
        adapter_bytes=sum(round(job.num_parameters * _held_bytes(job, facts.weight_bytes)) for job in jobs),
        activation_bytes=held_bytes,
        is_memory_measured=is_measured,
        seconds=factor * tried.seconds * sum(max(m.num_tokens / fullest.num_tokens, 0.1) for m in microbatches),
    )


def _held_bytes(job: LiveJob, weight_bytes: int) -> float:
    """Bytes per parameter that a job holds all the time."""
    return weight_bytes + kept_bytes(job.spec) + sum_bytes(job.spec)


def _job_preview(engine: Engine, job: LiveJob) -> JobPreview:
    num_bytes = engine.bytes_of(job)
    return JobPreview(
        job.name,
        job.num_steps,
        job.progress.order.num_tokens(job.data.train.group_tokens),
        job.num_parameters,
        num_bytes,
        job.spec.adapter.experts_in_words,
        engine.budget([job.spec.adapter]).num_alike(num_bytes),
    )


def _plan_that_fits(engine: Engine) -> tuple[list[Microbatch], Microbatch, MemoryTrial]:
    """The microbatches, the fullest of them, and its time and memory."""
    executor = engine.executor
    if not isinstance(executor, MicrobatchExecutor):
        raise ConfigError("one microbatch is tried on one device; leave --layout out.", where="--layout")
    while True:
        microbatches = plan_beginning(engine)
        fullest = max(microbatches, key=lambda m: m.num_tokens)
        with suppress(ReplicaMemoryError):
            return microbatches, fullest, executor.try_out(MicrobatchWork(fullest, engine.row_tile))
        # Not in a handler, which would hold on to the tensors of what failed.
        executor.release_memory()
        if not engine.shrink():
            raise ConfigError(
                f"a microbatch of {engine.limits.capacity} tokens, as the longest sample needs, does not fit the GPU's "
                "memory; lower max_length, set recompute: full, or quantize the backbone.",
                where="capacity",
            )


def plan_beginning(engine: Engine) -> list[Microbatch]:
    """The first microbatches of all jobs, up to `PLANNED_SAMPLES` samples of each. Programs are made as in training
    (`lookahead.py`): by the engine's planner, or without search time right after a job has arrived. Jobs wait for a
    seat by priority and arrival."""
    waiting = deque(sorted((_PreviewedJob.of(job) for job in engine.jobs.values()), key=lambda c: -c.job.spec.priority))
    arrivals = list(engine.jobs)
    running: list[_PreviewedJob] = []
    found: list[Microbatch] = []
    while waiting or running:
        planner = engine.planner
        while waiting and (engine.max_jobs is None or len(running) < engine.max_jobs):
            running.append(waiting.popleft())
            planner = planner.within(0.0)
        running.sort(key=lambda course: arrivals.index(course.job.spec.name))
        found += _run_program(running, planner([course.queue() for course in running], engine.limits).turns)
        running = [course for course in running if not course.has_ended]
    return found


def _run_program(running: Sequence[_PreviewedJob], turns: Sequence[Turn]) -> list[Microbatch]:
    """Microbatches that training would run of a program, up to the end of a job."""
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
    job: LiveJob
    num_steps: int
    step: int = 0
    sample: int = 0
    num_tokens: int = 0

    @classmethod
    def of(cls, job: LiveJob) -> _PreviewedJob:
        return cls(job, min(job.num_steps, max(1, PLANNED_SAMPLES // job.progress.order.batch_size)))

    @property
    def has_ended(self) -> bool:
        return self.step == self.num_steps

    def queue(self) -> JobQueue:
        job, last = self.job, min(self.num_steps, self.step + PLANNED_BATCHES)
        batches = []
        for step in range(self.step, last):
            first = self.sample if step == self.step else 0
            groups = job.progress.batches.groups(step, first)
            batches.append(Batch(step, first, tuple(job.progress.batches.lengths(step))[first:], groups))
        is_all = last == self.num_steps
        return JobQueue(job.spec.name, tuple(batches), is_all, job.spec.priority, self.num_tokens, lane=job.lane)

    def take_step(self) -> None:
        self.num_tokens += self.job.progress.batches[self.step].num_tokens
        self.step, self.sample = self.step + 1, 0
