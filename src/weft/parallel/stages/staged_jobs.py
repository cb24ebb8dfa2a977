"""The jobs of an executor in stages: what each replica holds of them, and where they are at home.

A job with order-independent sums is on every replica, whose adapters stay equal; any other is at home on one, and moves
with all its state where a program has it run on another. At any moment some replica has it whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.engine.execute.protocol import NewJob, ReplicaMemoryError
from weft.parallel.stages.find_start import find_start
from weft.parallel.stages.gradient import JobShare
from weft.parallel.stages.refusals import refuse_unlike
from weft.parallel.stages.stage_group import StageGroup
from weft.parallel.stages.state_parts import cut_state, join_state
from weft.plan.program import Program, Step


@dataclass
class StagedJob:
    """A job, and what each stage holds of it."""

    given: NewJob
    shares: dict[int, list[JobShare]]
    """By the replicas that have it."""
    has_seat: bool = False
    is_unknown: bool = False
    """Its start is to be found in its data, which nobody has looked at."""

    @property
    def home(self) -> int:
        """The replica that is asked about it: what others have is equal."""
        return min(self.shares)


class StagedJobs:
    """All jobs that an executor has, on the stages of its replicas."""

    def __init__(self, stages: StageGroup, replicas: Sequence[range], owners: Sequence[Sequence[int]]) -> None:
        """`replicas`: the stages of each; `owners`: those that share the frozen weights of a copy, together."""
        self._stages, self._replicas, self._owners = stages, replicas, owners
        self._jobs: dict[str, StagedJob] = {}

    def __getitem__(self, name: str) -> StagedJob:
        return self._jobs[name]

    def add(self, job: NewJob) -> list[JobShare]:
        """Makes a job's shares, on all replicas or on the one where the least is trained so far; those of its home."""
        where = range(len(self._replicas)) if job.spec.gradient_sum == "any_order" else [self._emptiest()]
        shares = self._place(job, where)
        added = self._jobs[job.spec.name] = StagedJob(job, shares, is_unknown=job.spec.adapter.eva is not None)
        return shares[added.home]

    def drop(self, job: str) -> None:
        """Forgets a job."""
        self.ask("drop", job)
        del self._jobs[job]

    def seat(self, job: str) -> None:
        """Takes a slot for a job on every stage that has a share, or on none."""
        try:
            if self._jobs[job].is_unknown:
                homes = self._jobs[job].shares.keys()
                owners = [[self._replicas[k] for k in own] for own in self._owners if homes & {*own}]
                find_start(self._stages, owners, job)
                self._jobs[job].is_unknown = False
            self.ask("seat", job)
        except ReplicaMemoryError:
            self.ask("unseat", job)
            raise
        self._jobs[job].has_seat = True

    def unseat(self, job: str) -> None:
        """Frees a job's slots."""
        self.ask("unseat", job)
        self._jobs[job].has_seat = False

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        """Gives every stage its part of a job's state."""
        self._jobs[job].is_unknown = False
        self._restore(job, self._jobs[job].shares, tensors)

    def gather_to_home(self, program: Program) -> None:
        """Moves every job that a program runs on another replica than the one it is at home on."""
        homes = {
            i.job: replica
            for replica, devices in enumerate(self._replicas)
            for i in program.stages[devices.start]
            if isinstance(i, Step)
        }
        for name, home in homes.items():
            if home not in self._jobs[name].shares:
                self._move(name, home)

    def ask(self, what: str, job: str, *given: Any) -> list[Any]:
        """What every stage answers that has a job."""
        devices = [device for replica in self._jobs[job].shares for device in self._replicas[replica]]
        return self._stages.call_each(what, dict.fromkeys(devices, (job, *given)))

    def call_home(self, what: str, job: str, *given: Any) -> list[Any]:
        """What every stage answers of the replica that is asked about a job."""
        return self._stages.call_each(what, dict.fromkeys(self._replicas[self._jobs[job].home], (job, *given)))

    def _place(self, job: NewJob, replicas: Iterable[int]) -> dict[int, list[JobShare]]:
        """Makes a job's shares on some replicas; what cannot be leaves nothing behind."""
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
        """The replica with the fewest trained numbers for each of its stages."""
        counts = [0.0] * len(self._replicas)
        for job in self._jobs.values():
            for replica, shares in job.shares.items():
                counts[replica] += sum(share.num_trained for share in shares) / len(shares)
        return counts.index(min(counts))

    def _move(self, name: str, home: int) -> None:
        """Moves a job with all its state; it leaves the replica that it was on when it is whole on the other."""
        job = self._jobs[name]
        tensors = join_state(self.call_home("tensors", name))
        try:
            shares = self._place(job.given, [home])
            self._restore(name, shares, tensors)
            if job.has_seat:
                self._stages.call_each("seat", dict.fromkeys(self._replicas[home], (name,)))
        except Exception:
            self._remove(name, [home])
            raise
        self._remove(name, job.shares)
        job.shares = shares

    def _remove(self, name: str, replicas: Iterable[int]) -> None:
        """Takes a job off replicas that are not its home."""
        devices = [device for replica in sorted(replicas) for device in self._replicas[replica]]
        self._stages.call_each("remove", dict.fromkeys(devices, (name,)))
