"""Gives jobs their places on the backbone: `plan.admit` decides at step boundaries, and the executor carries it out.

A job that waits, is paused or has ended keeps its whole state on the CPU and costs the GPU nothing. A job with a place
has its weights, gradients and moments beside the backbone, and a slot. Moving between the two changes no bit.

How much jobs may take: on a CPU there is no limit unless one is given. On a GPU it is what is left beside the backbone
and a microbatch's activations; those are estimated from the model's shape until microbatches have run, and measured
from then on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from weft.engine.execute.protocol import Executor, ReplicaMemory, ReplicaMemoryError
from weft.engine.jobs.live_job import LiveJob
from weft.errors import JobError
from weft.job_state import JobState
from weft.plan.admit import MARGIN, Admission, Applicant, Budget, Share, admit
from weft.plan.cost.job_state import best_bytes, job_state_bytes, passing_bytes
from weft.spec import AdapterSpec, JobSpec


class Placement:
    """The places on one backbone: how many there is memory for, and who has one."""

    def __init__(
        self,
        executor: Executor,
        jobs: Mapping[str, LiveJob],
        *,
        max_jobs: int | None,
        job_memory: int | None,
        weights: Mapping[str, float],
    ) -> None:
        """`jobs`: those of the engine, as they come and go; `job_memory`: bytes for all with a place, if limited.

        `weights`: by tenant, and may change; 1 where none is given.
        """
        self._weights = weights
        self._executor = executor
        self._jobs = jobs
        self._max_jobs = max_jobs
        self._seated: set[str] = set()
        """Jobs with a place."""
        self._job_memory = job_memory
        self._measured_bytes: int | None = None
        """What a GPU has held at most besides its jobs, once microbatches have run."""
        self._peak_bytes = 0
        self._proven_bytes = 0
        self._has_run_out = False
        """While microbatches were watched."""
        self._ceiling_bytes: int | None = None
        """Less than what jobs would have held when there turned out to be no room for one more."""
        self._credit: dict[str, int] = {}
        """Tokens a tenant counts as having had besides its own."""

    def waiting(self) -> list[LiveJob]:
        """Jobs that want a place, in the order in which they came."""
        return self._in_state(JobState.QUEUED)

    def check(self, job: LiveJob, capacity: int) -> None:
        """Refuses a job that would not fit even alone."""
        reason = self._budget(capacity).why_never(self.bytes_of(job))
        if reason is not None:
            hint = "Lower adapter.r or max_length, or quantize the backbone."
            raise JobError(reason.text, where=job.spec.name, hint=hint)

    def fits_any_waiting(self, capacity: int) -> bool:
        """Whether microbatches of this many tokens leave memory for at least one of those that wait."""
        budget = self._budget(capacity)
        return any(budget.why_never(self.bytes_of(job)) is None for job in self.waiting())

    def can_fill(self, capacity: int) -> bool:
        """Whether they leave memory for as many of those that wait as fill one with a global batch each, or for all."""
        left_bytes = self._budget(capacity).usable_bytes
        if left_bytes is None or self._measured_bytes is not None:
            # Once microbatches have run, what is left no longer tells how it depends on their size.
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
        """Who gets a place and who gives one up."""
        waiting, running = self.waiting(), [job for job in list(self._jobs.values()) if job.is_running]
        arrivals = {name: place for place, name in enumerate(list(self._jobs))}

        def applicants(jobs: Sequence[LiveJob]) -> list[Applicant]:
            return [self._applicant(job.spec, arrivals[job.spec.name], self.bytes_of(job)) for job in jobs]

        return admit(applicants(waiting), applicants(running), self._budget(capacity), self._shares(waiting, running))

    def give(self, job: LiveJob) -> bool:
        """Puts a job on the backbone; False if the memory turned out not to be there: the job stays where it was."""
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
        """Takes a job off the backbone; its state waits on the CPU."""
        if self.has_place(job):
            self._seated.remove(job.name)
            job.progress.rewind()
            self._executor.unseat(job.name)

    def has_place(self, job: LiveJob) -> bool:
        """Whether a job is on the backbone."""
        return job.name in self._seated

    def is_empty(self) -> bool:
        """Whether no job is on the backbone."""
        return not self._seated

    def held_bytes(self) -> int:
        """What the jobs with a place take, or will once each has a best to keep."""
        return sum(self.bytes_of(job) for job in self._placed())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what the GPU holds while microbatches run; those who train then do fit, unless the memory runs out."""
        held_bytes, allocated_bytes = self.held_bytes(), self._allocated_bytes()
        self._has_run_out = False
        yield
        peak = self._executor.peak_bytes()
        if self._has_run_out or not peak:
            return
        if peak > self._peak_bytes:
            # Who trained when it rose is known; what rose before has been counted with those who trained then.
            self._measured_bytes = max(self._measured_bytes or 0, peak - allocated_bytes)
            self._peak_bytes = peak
        self._proven_bytes = max(self._proven_bytes, held_bytes)

    def ran_out(self) -> None:
        """Forgets what was proven and measured: it did not fit, and smaller microbatches hold less."""
        self._has_run_out = True
        self._measured_bytes, self._peak_bytes, self._proven_bytes = None, 0, 0
        self._executor.reset_peak()

    def bytes_of(self, job: LiveJob) -> int:
        """Memory a job takes while it has a place."""
        weight_bytes = self._executor.facts.weight_bytes
        own = job.num_parameters * (weight_bytes + job_state_bytes(job.spec))
        own += job.num_reference_parameters * weight_bytes
        return math.ceil(own) + self._reference_bytes(job) + job.kernel_bytes

    def _reference_bytes(self, job: LiveJob) -> int:
        """What references say of a job's samples; all of it is on the last of several stages, which jobs are taken to
        fill evenly."""
        return job.reference_bytes * max(self._executor.facts.replica_sizes)

    def _allocated_bytes(self) -> int:
        # A best that is yet to come is no part of what there is, nor what steps hold for a moment.
        placed = self._placed()
        best = sum(job.num_parameters * best_bytes(job.spec) for job in placed if not job.progress.has_best)
        # What references say of samples comes bit by bit, too.
        coming = sum(job.num_parameters * passing_bytes(job.spec) + self._reference_bytes(job) for job in placed)
        return self.held_bytes() - best - coming

    def _placed(self) -> list[LiveJob]:
        return [job for job in list(self._jobs.values()) if self.has_place(job)]

    def _in_state(self, state: JobState) -> list[LiveJob]:
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self._jobs.values()) if job.state is state]

    def _applicant(self, spec: JobSpec, arrival: int, num_bytes: int) -> Applicant:
        return Applicant(spec.name, arrival, num_bytes, spec.priority, spec.tenant)

    def _budget(self, capacity: int) -> Budget:
        return self.budget(capacity, [job.spec.adapter for job in list(self._jobs.values())])

    def budget(self, capacity: int, adapters: Collection[AdapterSpec]) -> Budget:
        """What jobs with such adapters may take together, beside microbatches of so many tokens."""
        budget = Budget(self._job_memory, max_jobs=self._max_jobs)
        memory = self._executor.memory() if self._job_memory is None else None
        if memory is not None:
            fixed_bytes = self._fixed_bytes(memory, capacity, adapters)
            budget = Budget(memory.usable_bytes, fixed_bytes, MARGIN, self._proven_bytes, self._max_jobs)
        if self._ceiling_bytes is None:
            return budget
        usable = budget.usable_bytes
        at_most = self._ceiling_bytes if usable is None else min(usable, self._ceiling_bytes)
        return replace(budget, total_bytes=at_most, fixed_bytes=0, margin=0.0, proven_bytes=0)

    def _fixed_bytes(self, memory: ReplicaMemory, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        """What of a GPU's memory is not for jobs."""
        if self._measured_bytes is not None:
            return self._measured_bytes
        at_rest = memory.allocated_bytes - self._allocated_bytes()
        return at_rest + self._executor.activation_bytes(capacity, adapters)

    def _shares(self, waiting: Sequence[LiveJob], running: Sequence[LiveJob]) -> dict[str, Share]:
        """What each tenant has had. Who comes, or comes back, starts level, by weight, with the least served present.

        Otherwise a newcomer would have the backbone to itself until it had made up for all that others ever had.
        """
        served: dict[str, int] = {}
        for job in list(self._jobs.values()):
            served[job.spec.tenant] = served.get(job.spec.tenant, 0) + job.num_tokens
        present = {job.spec.tenant for job in (*waiting, *running)}
        stayed = {job.spec.tenant for job in (*waiting, *running) if self.has_place(job) or job.status.wait_reported}
        had = {tenant: served[tenant] + self._credit.get(tenant, 0) for tenant in present}
        weight = {tenant: self._weights.get(tenant, 1.0) for tenant in present}
        least = min((had[tenant] / weight[tenant] for tenant in stayed), default=0.0)
        for tenant in present - stayed:
            level = int(least * weight[tenant])
            self._credit[tenant] = self._credit.get(tenant, 0) + max(level - had[tenant], 0)
            had[tenant] = max(had[tenant], level)
        return {tenant: Share(weight[tenant], tokens) for tenant, tokens in had.items()}
