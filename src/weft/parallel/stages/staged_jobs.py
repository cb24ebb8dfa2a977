"""The jobs of an executor in stages: what each replica holds of them, and which replica is their home.

A job with order-independent sums is on every replica, whose adapters stay equal; any other is at home on one, and moves
with all its state when a program runs it on another. At any moment some replica has it whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.engine.execute.protocol import NewJob, ReplicaMemoryError
from weft.parallel.stages.shares import JobShare, StagePassResult, cut_state, join_state, refuse_unlike
from weft.parallel.stages.work import StageGroup
from weft.plan.program import Program, Step


@dataclass
class StagedJob:
    given: NewJob
    shares: dict[int, list[JobShare]]
    has_seat: bool = False
    is_unknown: bool = False
    """True while its start has to be computed from its data."""

    @property
    def home(self) -> int:
        """Replica that answers for the job: others have equal state."""
        return min(self.shares)


class StagedJobs:
    def __init__(self, stages: StageGroup, replicas: Sequence[range], owners: Sequence[Sequence[int]]) -> None:
        self._stages, self._replicas, self._owners = stages, replicas, owners
        self._jobs: dict[str, StagedJob] = {}
        self.num_seatings = 0
        """How often a job has come to a stage or left one."""

    def __getitem__(self, name: str) -> StagedJob:
        return self._jobs[name]

    def add(self, job: NewJob) -> list[JobShare]:
        """Makes a job's shares, on all replicas or on the one that trains least; returns those of its home."""
        where = range(len(self._replicas)) if job.spec.gradient_sum == "any_order" else [self._emptiest()]
        shares = self._make_shares(job, where)
        added = self._jobs[job.spec.name] = StagedJob(job, shares, is_unknown=job.spec.adapter.eva is not None)
        return shares[added.home]

    def by_stage(self, job_bytes: Mapping[str, int]) -> list[float]:
        """Bytes of these jobs on each stage, divided by the parameters there."""
        found = [0.0] * (self._replicas[-1].stop)
        for name, num_bytes in job_bytes.items():
            # Other threads may have dropped it meanwhile.
            job = self._jobs.get(name)
            for replica, shares in () if job is None else job.shares.items():
                total = sum(share.num_trained for share in shares) or 1
                for device, share in zip(self._replicas[replica], shares, strict=True):
                    found[device] += num_bytes * share.num_trained / total
        return found

    def drop(self, job: str) -> None:
        self.call("drop", job)
        del self._jobs[job]

    def seat(self, job: str) -> None:
        """Takes a slot on every stage that has a share, or on none."""
        try:
            if self._jobs[job].is_unknown:
                homes = self._jobs[job].shares.keys()
                owners = [[self._replicas[k] for k in own] for own in self._owners if homes & {*own}]
                find_start(self._stages, owners, job)
                self._jobs[job].is_unknown = False
            self.call("seat", job)
        except ReplicaMemoryError:
            self.call("unseat", job)
            raise
        self._jobs[job].has_seat = True
        self.num_seatings += 1

    def unseat(self, job: str) -> None:
        self.num_seatings += 1
        self.call("unseat", job)
        self._jobs[job].has_seat = False

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        self._jobs[job].is_unknown = False
        self._restore(job, self._jobs[job].shares, tensors)

    def gather_to_home(self, program: Program) -> None:
        """Moves every job to the replica that a program trains it on."""
        homes = {
            i.job: replica
            for replica, devices in enumerate(self._replicas)
            for i in program.stages[devices.start]
            if isinstance(i, Step)
        }
        for name, home in homes.items():
            if home not in self._jobs[name].shares:
                self._move(name, home)

    def call(self, what: str, job: str, *given: Any) -> list[Any]:
        devices = [device for replica in self._jobs[job].shares for device in self._replicas[replica]]
        return self._stages.call_each(what, dict.fromkeys(devices, (job, *given)))

    def call_home(self, what: str, job: str, *given: Any) -> list[Any]:
        return self._stages.call_each(what, dict.fromkeys(self._replicas[self._jobs[job].home], (job, *given)))

    def _make_shares(self, job: NewJob, replicas: Iterable[int]) -> dict[int, list[JobShare]]:
        """Makes a job's shares on some replicas; an error leaves nothing there."""
        name, where = job.spec.name, list(replicas)
        devices = [device for replica in where for device in self._replicas[replica]]
        try:
            found = dict(zip(devices, self._stages.call_each("add", dict.fromkeys(devices, (job,))), strict=True))
            shares = {replica: [found[device] for device in self._replicas[replica]] for replica in where}
            for own in shares.values():
                refuse_unlike(own)
        except Exception:
            self._stages.call_each("drop", dict.fromkeys(devices, (name,)))
            raise
        known = {replica: [dataclasses.replace(share, shared={}) for share in own] for replica, own in shares.items()}
        self._stages.call_each("know_shares", dict.fromkeys(devices, (name, known)))
        return shares

    def _restore(self, job: str, where: Mapping[int, Sequence[JobShare]], tensors: Mapping[str, torch.Tensor]) -> None:
        given: dict[int, tuple[Any, ...]] = {}
        for replica, shares in where.items():
            parts = cut_state(tensors, shares)
            given |= {device: (job, part) for device, part in zip(self._replicas[replica], parts, strict=True)}
        self._stages.call_each("restore", given)

    def _emptiest(self) -> int:
        counts = [0.0] * len(self._replicas)
        # A copy at once: other threads may submit while we look.
        for job in list(self._jobs.values()):
            for replica, shares in job.shares.items():
                counts[replica] += sum(share.num_trained for share in shares) / len(shares)
        return counts.index(min(counts))

    def _move(self, name: str, home: int) -> None:
        job = self._jobs[name]
        self.num_seatings += 1
        tensors = join_state(self.call_home("tensors", name))
        try:
            shares = self._make_shares(job.given, [home])
            self._restore(name, shares, tensors)
            if job.has_seat:
                self._stages.call_each("seat", dict.fromkeys(self._replicas[home], (name,)))
        except Exception:
            self._remove(name, [home])
            raise
        self._remove(name, job.shares)
        job.shares = shares

    def _remove(self, name: str, replicas: Iterable[int]) -> None:
        devices = [device for replica in sorted(replicas) for device in self._replicas[replica]]
        self._stages.call_each("remove", dict.fromkeys(devices, (name,)))


PassResults = list[StagePassResult | None]
"""Results of a pass by stage; None where there are no more samples, or where others have the job."""


def find_start(stages: StageGroup, owners: Sequence[Sequence[range]], job: str) -> None:
    """Runs a job's first samples through replicas until all their stages have enough. `owners`: for each copy of the
    frozen weights, the stages of the replicas that share it, one of which has the job."""
    is_found = False
    try:
        while not is_found:
            results = [each for together in owners for each in _run_pass(stages, together, job)]
            is_found = not results or all(each.is_enough for each in results)
    finally:
        devices = [device for together in owners for own in together for device in own]
        stages.call_each("end_passes", dict.fromkeys(devices, (job, is_found)))


def _run_pass(stages: StageGroup, together: Sequence[range], job: str) -> list[StagePassResult]:
    """One pass from stage to stage, through all replicas that gather weights together; empty once it is over."""
    results: list[StagePassResult] = []
    entering: PassResults = [None] * len(together)
    for devices in zip(*together, strict=True):
        left = [None if found is None else found.left_TD for found in entering]
        given = {device: (job, left_TD) for device, left_TD in zip(devices, left, strict=True)}
        entering = stages.call_each("run_start_pass", given)
        results += [each for each in entering if each is not None]
    return results
