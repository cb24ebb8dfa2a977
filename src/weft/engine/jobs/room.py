"""Seats for jobs on the backbone, and how many tokens a microbatch may hold.

`plan.admit` decides at step boundaries, and the executor carries it out. A job that waits, is paused or has ended keeps
its whole state on the CPU and costs the GPU nothing. A job with a seat has its weights, gradients and moments beside
the backbone, and a slot. Moving between the two changes no bit.

Jobs may take what is left of the memory beside the backbone and the activations of a microbatch. Those are estimated
from the model's shape, and the estimate is fitted to the peaks of the microbatches that have run
(`fitted_memory.py`). On a GPU that is what its tensors take; on a CPU it is the resident size of the process, and jobs
that wait take memory too. When a GPU runs out of memory, microbatches become smaller (`CapacityLimit`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from weft.engine.execute.protocol import Executor, ProgramExecutor, Replica, ReplicaMemoryError
from weft.engine.jobs.fitted_memory import FittedMemory
from weft.engine.jobs.live_job import LiveJob
from weft.engine.timeline import TimelineRecorder
from weft.errors import ConfigError, JobError, counted
from weft.job_state import JobState, Reason, ReasonCode
from weft.plan.admit import EVALUATED_PER_TRAINED, Admission, Applicant, Budget, Share, admit
from weft.plan.cost.memory import best_bytes, job_bytes, job_state, passing_bytes
from weft.plan.types import Limits, max_lead
from weft.spec import AdapterSpec
from weft.spec.run import Capacity


class Placement:
    """Seats on one backbone: how many the memory allows, and which jobs have one."""

    def __init__(
        self,
        executor: Executor,
        jobs: Mapping[str, LiveJob],
        *,
        max_jobs: int | None,
        job_memory: int | None,
        weights: Mapping[str, float],
        timeline: TimelineRecorder,
    ) -> None:
        """`jobs`: the engine's, live; `job_memory`: bytes for all seated jobs; `weights`: by tenant, live. The timeline
        gets every measured peak, with the prediction before it."""
        self._weights = weights
        self._executor = executor
        self._memory = FittedMemory(executor, timeline)
        self._jobs = jobs
        self._max_jobs = max_jobs
        self._seated: set[str] = set()
        self._job_memory = job_memory
        self._proven_bytes = 0
        self._has_run_out = False
        """True if the memory ran out while microbatches were watched."""
        self._ceiling_bytes: int | None = None
        """Upper bound of the bytes that jobs may hold: less than they would have held with the job that did not fit."""
        self._credit: dict[str, int] = {}
        """Tokens added to a tenant's count so that it starts level."""

    def waiting(self) -> list[LiveJob]:
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self._jobs.values()) if job.state is JobState.QUEUED]

    def check(self, job: LiveJob, capacity: int) -> None:
        """JobError for a job that would not fit even alone."""
        reason = self._budget(capacity).why_never(self.bytes_of(job))
        if reason is not None:
            hint = "Lower adapter.r or max_length, or quantize the backbone."
            raise JobError(reason.text, where=job.spec.name, hint=hint)

    def fits_any_waiting(self, capacity: int) -> bool:
        """True if this capacity leaves memory for at least one waiting job."""
        budget = self._budget(capacity)
        return any(budget.why_never(self.bytes_of(job)) is None for job in self.waiting())

    def can_fill(self, capacity: int) -> bool:
        """True if this capacity leaves memory for enough waiting jobs to fill a microbatch with a global batch each."""
        left_bytes = self._budget(capacity).usable_bytes
        if left_bytes is None or self._memory.has_peaks:
            # Once microbatches have run, they keep their size.
            return True
        num_tokens = 0.0
        for job in self.waiting()[: self._max_jobs]:
            left_bytes -= self.bytes_of(job)
            if left_bytes < 0:
                return num_tokens >= capacity
            data = job.data.train
            num_tokens += data.summary.num_tokens * min(1.0, job.spec.batch_size / len(data.samples))
        return True

    def decide(self, capacity: int) -> Admission:
        waiting, running = self.waiting(), [job for job in list(self._jobs.values()) if job.is_running]
        arrivals = {name: index for index, name in enumerate(list(self._jobs))}

        def applicants(jobs: Sequence[LiveJob]) -> list[Applicant]:
            return [
                Applicant(job.name, arrivals[job.name], self.bytes_of(job), job.spec.priority, job.spec.tenant)
                for job in jobs
            ]

        return admit(applicants(waiting), applicants(running), self._budget(capacity), self._shares(waiting, running))

    def give(self, job: LiveJob) -> bool:
        """Seats a job; False if there was no memory for it, and the job stays on the CPU."""
        job.progress.rewind()
        with suppress(ReplicaMemoryError):
            self._executor.seat(job.name)
            self._seated.add(job.name)
            return True
        held = self.held_bytes()
        if held:
            self._ceiling_bytes = held + self.bytes_of(job) - 1
        return False

    def take(self, job: LiveJob) -> None:
        if self.has_seat(job):
            self._seated.remove(job.name)
            job.progress.rewind()
            self._executor.unseat(job.name)

    def has_seat(self, job: LiveJob) -> bool:
        return job.name in self._seated

    def is_empty(self) -> bool:
        return not self._seated

    def in_flight(self, capacity: int) -> tuple[int, ...]:
        """Full microbatches that each stage has memory for beside the seated jobs; empty where that is not known."""
        if not isinstance(self._executor, ProgramExecutor):
            return ()
        seated = self._seated_jobs()
        adapters = [job.spec.adapter for job in seated]
        return self._executor.in_flight(capacity, adapters, {job.name: self.bytes_of(job) for job in seated})

    def held_bytes(self) -> int:
        return sum(self.bytes_of(job) for job in self._seated_jobs())

    @contextmanager
    def watched(self, capacity: int) -> Iterator[None]:
        """Measures the memory while microbatches run; jobs that trained then are proven to fit."""
        held_bytes, allocated, seated = self.held_bytes(), self._allocated_bytes(), self._seated_jobs()
        self._has_run_out = False
        self._memory.begin(capacity, [job.spec.adapter for job in list(self._jobs.values())], allocated)
        yield
        if not self._has_run_out and self._memory.learn(_longest(seated), allocated):
            self._proven_bytes = max(self._proven_bytes, held_bytes)

    def ran_out(self) -> None:
        """Clears what was proven and measured: it did not fit, and smaller microbatches hold less."""
        self._has_run_out = True
        self._proven_bytes = 0
        self._memory.forget()

    def bytes_of(self, job: LiveJob) -> int:
        facts = self._executor.facts
        weight_bytes = facts.weight_bytes
        own = job_bytes(job.num_parameters, weight_bytes, job_state(job.spec), min(facts.tensor))
        own += job.num_reference_parameters * weight_bytes
        return math.ceil(own) + self._reference_bytes(job) + job.kernel_bytes

    def _reference_bytes(self, job: LiveJob) -> int:
        return job.reference_bytes * max(self._executor.facts.replica_sizes)

    def _allocated_bytes(self) -> dict[str, int]:
        return {job.name: self._allocated_by(job) for job in self._seated_jobs()}

    def _allocated_by(self, job: LiveJob) -> int:
        # Not yet allocated: a best that is yet to come, and what steps hold for a moment.
        best = 0 if job.progress.has_best else best_bytes(job.spec)
        # Reference values are computed step by step, too.
        coming = job.num_parameters * (best + passing_bytes(job.spec)) + self._reference_bytes(job)
        return self.bytes_of(job) - coming

    def _seated_jobs(self) -> list[LiveJob]:
        return [job for job in list(self._jobs.values()) if self.has_seat(job)]

    def _budget(self, capacity: int) -> Budget:
        return self.budget(capacity, [job.spec.adapter for job in list(self._jobs.values())])

    def budget(self, capacity: int, adapters: Collection[AdapterSpec]) -> Budget:
        budget = Budget(self._job_memory, max_jobs=self._max_jobs)
        if self._job_memory is None:
            alive = [job for job in list(self._jobs.values()) if job.is_alive]
            jobs, seated = ({job.name: self.bytes_of(job) for job in own} for own in (alive, self._seated_jobs()))
            found = self._memory.budget(capacity, adapters, _longest(alive), jobs, seated, self._allocated_bytes())
            if found is not None:
                budget = replace(found, proven_bytes=self._proven_bytes, max_jobs=self._max_jobs)
        if self._ceiling_bytes is None:
            return budget
        usable = budget.usable_bytes
        at_most = self._ceiling_bytes if usable is None else min(usable, self._ceiling_bytes)
        return replace(budget, total_bytes=at_most, fixed_bytes=0, margin=0.0, proven_bytes=0)

    def _shares(self, waiting: Sequence[LiveJob], running: Sequence[LiveJob]) -> dict[str, Share]:
        """Tokens served per tenant. A tenant that arrives, or returns, starts level by weight with the least served
        one. Otherwise a new tenant would have the backbone to itself until it had caught up with all that others ever
        had."""
        served: dict[str, int] = {}
        for job in list(self._jobs.values()):
            tokens = job.num_tokens + job.evaluated_tokens // EVALUATED_PER_TRAINED
            served[job.spec.tenant] = served.get(job.spec.tenant, 0) + tokens
        present = {job.spec.tenant for job in (*waiting, *running)}
        stayed = {job.spec.tenant for job in (*waiting, *running) if self.has_seat(job) or job.status.wait_reported}
        had = {tenant: served[tenant] + self._credit.get(tenant, 0) for tenant in present}
        weight = {tenant: self._weights.get(tenant, 1.0) for tenant in present}
        least = min((had[tenant] / weight[tenant] for tenant in stayed), default=0.0)
        for tenant in present - stayed:
            level = int(least * weight[tenant])
            self._credit[tenant] = self._credit.get(tenant, 0) + max(level - had[tenant], 0)
            had[tenant] = max(had[tenant], level)
        return {tenant: Share(weight[tenant], tokens) for tenant, tokens in had.items()}


def _longest(jobs: Sequence[LiveJob]) -> int:
    return max((job.longest for job in jobs), default=0)


OUT_OF_MEMORY = (
    "the GPU ran out of memory at a capacity of {before} tokens; its jobs go on from their last step with {now}, which "
    "other runs on this GPU can start with (capacity: {now})."
)
SMALLER = (
    "microbatches of {before} tokens would leave no memory for {whom} on this device; they hold at most {now} instead "
    "(capacity: {now})."
)
LESS = "stages ran out of memory: they hold at most {held} in flight, of {capacity} tokens each."
NO_ROOM = Reason(
    ReasonCode.DOES_NOT_FIT,
    "the GPU has no memory for its adapter, even alone; lower adapter.r or capacity, or quantize the backbone.",
)


def refuse_empty(capacity: Capacity, max_jobs: int | None) -> None:
    if capacity != "auto" and capacity < 2:
        raise ConfigError(f"got {capacity}; accepted is auto or at least 2 tokens.", where="Engine capacity")
    if max_jobs is not None and max_jobs < 1:
        raise ConfigError(f"got {max_jobs}; accepted is at least 1.", where="Engine max_jobs")


class CapacityLimit:
    """Maximum number of tokens of a microbatch: as requested, or fewer once the memory has run out."""

    def __init__(self, replica: Replica, allowed: Sequence[int], jobs: Mapping[str, LiveJob]) -> None:
        """`allowed`: the requested capacity, then smaller ones that may replace it so that microbatches are full."""
        self.requested, self._least_allowed = allowed[0], allowed[-1]
        self.limits = Limits(self.requested)
        self.row_tile = replica.row_tile(self.requested)
        self._replica = replica
        self._jobs = jobs
        self._most_in_flight = max(max_lead(max(replica.facts.replica_sizes)))

    @property
    def capacity(self) -> int:
        return self.limits.capacity

    def conditions(self) -> dict[str, Any]:
        """The part of the environment that decides bits."""
        return {"capacity": self.capacity, "row_tile": self.row_tile, "kernels": self._replica.facts.path}

    def fit(self, placement: Placement) -> str | None:
        """Shrinks until at least one waiting job fits, if one ever can, or, within `allowed`, until they can fill a
        microbatch. Returns the message for the user if it shrank."""
        before, whom = self.capacity, "a job"
        if not placement.fits_any_waiting(self.least()):
            return None
        while not placement.fits_any_waiting(self.capacity) and self.shrink():
            pass
        while self.capacity > self._least_allowed and not placement.can_fill(self.capacity) and self.shrink():
            whom = "enough jobs to fill them"
        return None if self.capacity == before else SMALLER.format(before=before, now=self.capacity, whom=whom)

    def shrink(self) -> bool:
        """Halves the capacity, but not below the longest sample of any live job; False if it cannot."""
        return self._set(max(self.capacity // 2, self.least()))

    def lessen(self, longest: int) -> str | None:
        if self._most_in_flight > 1:
            self._most_in_flight //= 2
        elif not self._set(max(self.capacity // 2, self.least(longest))):
            return None
        return LESS.format(held=counted(self._most_in_flight, "microbatch"), capacity=self.capacity)

    def within(self, in_flight: tuple[int, ...]) -> Limits:
        """The limits of a program; `in_flight`: what each stage has memory for."""
        sizes, most = self._replica.facts.replica_sizes, self._most_in_flight
        known = in_flight or (() if most == max(max_lead(max(sizes))) else (most,) * sum(sizes))
        return replace(self.limits, row_tile=self.row_tile, in_flight=tuple(min(most, number) for number in known))

    def least(self, longest: int = 0) -> int:
        """Smallest capacity it can shrink to, with another job whose longest sample has `longest` tokens."""
        return max(self._longest(), longest, 2)

    def adopt(self, requested: int | None, capacity: int | None) -> bool:
        """Continues with the capacity that a run was left with; False if that is no smaller."""
        if requested != self.requested or capacity is None:
            return False
        return self._set(max(capacity, self._longest()))

    def holders(self) -> list[LiveJob]:
        return [job for job in self._alive() if job.longest >= self.capacity]

    def _alive(self) -> list[LiveJob]:
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self._jobs.values()) if job.is_alive]

    def _longest(self) -> int:
        return max((job.longest for job in self._alive()), default=0)

    def _set(self, capacity: int) -> bool:
        if capacity >= self.capacity:
            return False
        self.limits = Limits(capacity)
        self.row_tile = self._replica.row_tile(capacity)
        return True


def too_long(tokens: int) -> Reason:
    return Reason(
        ReasonCode.SAMPLE_TOO_LONG,
        f"too long for this GPU: a microbatch of {tokens} tokens, as its longest sample needs, ran out of memory; "
        "lower max_length, set recompute: full, or quantize the backbone.",
    )
