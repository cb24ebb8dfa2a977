"""An executor whose replicas can be exchanged for others under the jobs it has.

The engine keeps one executor for good; what is behind it may change at a step boundary. Only jobs move: the state of
each is read as a checkpoint would have it, the old replicas are closed, new ones are opened, and every job is made
there and given its state. The old ones are closed first, because devices need not have room for both. Where the new
ones cannot be had, the old layout is opened again with the same state, so that no step is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from weft.data.chat.chat_template import Tokenizer
from weft.engine.execute.protocol import (
    AddedJob,
    Executor,
    MicrobatchWork,
    NewJob,
    OutcomeT,
    ReplicaFacts,
    ReplicaMemory,
    StateWork,
    Ticket,
    TrialRun,
    Work,
)
from weft.faults import point
from weft.plan.replan import MoveCost
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    import torch

OpenReplicas = Callable[[], Executor]


class NotMovedError(Exception):
    """The new replicas could not be had, for a reason that it tells; jobs are on the old ones again, as they were."""


class MovableExecutor:
    """Asks the replicas that there are now."""

    def __init__(self, open_replicas: OpenReplicas) -> None:
        """Opens the first replicas, and measures how long that takes."""
        self._open_now = open_replicas
        self._jobs: dict[str, NewJob] = {}
        self._seated: set[str] = set()
        self._begun: set[str] = set()
        """Jobs that have had a seat or a state: what others have is made anew wherever they are added."""
        self._gone: set[str] = set()
        """Jobs that had ended when their replica was lost: there is nothing to move."""
        self._load_s = 0.0
        self._job_s = 0.0
        """To read, make and restore one job, as far as that has been measured."""
        self._lock = threading.RLock()
        """Jobs may be added by other threads, but not while all of them move."""
        self._replicas: Executor | None = self._opened(open_replicas)
        """None while old ones are gone and new ones are not there yet."""
        self.facts: ReplicaFacts = self._now.facts
        self.tokenizer: Tokenizer = self._now.tokenizer

    @property
    def _now(self) -> Executor:
        assert self._replicas is not None, "no replicas could be had"
        return self._replicas

    @property
    def cost(self) -> MoveCost:
        """What a move would take now: as long as replicas took to open last, and jobs to be made or moved there."""
        return MoveCost(self._job_s * len(self._jobs), self._load_s)

    def move(self, open_next: OpenReplicas) -> dict[str, AddedJob]:
        """Exchanges the replicas at a step boundary, with nothing under way; what the new ones say of each job.

        NotMovedError if they could not be had.
        """
        with self._lock:
            begun_s = time.perf_counter()
            moving = [name for name in self._jobs if name not in self._gone]
            states = {name: self._now.wait(self._now.start(StateWork(name))) for name in moving if name in self._begun}
            states |= {name: {} for name in moving if name not in self._begun}
            read_s = time.perf_counter() - begun_s
            self._now.close()
            self._replicas = None
            try:
                added = self._take_up(open_next, states, read_s)
            except Exception as error:  # whatever it is, the run goes on where it was
                self._take_up(self._open_now, states, read_s)
                raise NotMovedError(str(error)) from error
            self._open_now = open_next
            return added

    def _take_up(
        self, open_replicas: OpenReplicas, states: dict[str, dict[str, torch.Tensor]], read_s: float
    ) -> dict[str, AddedJob]:
        """Opens replicas and brings every job there; leaves nothing open if that cannot be."""
        replicas = self._opened(open_replicas)
        begun_s, added = time.perf_counter(), dict[str, AddedJob]()
        try:
            for name, tensors in states.items():
                point("replicas.move")
                added[name] = replicas.add(self._jobs[name])
                if tensors:
                    replicas.restore(name, tensors)
                if name in self._seated:
                    replicas.seat(name)
        except BaseException:
            replicas.close()
            raise
        if states:
            self._job_s = (read_s + time.perf_counter() - begun_s) / len(states)
        while self._gone:
            del self._jobs[self._gone.pop()]
        self._replicas, self.facts, self.tokenizer = replicas, replicas.facts, replicas.tokenizer
        return added

    def _opened(self, open_replicas: OpenReplicas) -> Executor:
        begun_s = time.perf_counter()
        replicas = open_replicas()
        self._load_s = time.perf_counter() - begun_s
        return replicas

    def beside(self) -> Executor:
        """Another executor on the same replicas, which then must stay."""
        return self._now.beside()

    def check_adapter(self, adapter: AdapterSpec) -> None:
        """ConfigError if an adapter does not fit the backbone."""
        self._now.check_adapter(adapter)

    def row_tile(self, capacity: int) -> int:
        """Rows that every frozen product is computed in."""
        return self._now.row_tile(capacity)

    def activation_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        """What a microbatch may hold between forward and backward."""
        return self._now.activation_bytes(capacity, adapters)

    def memory(self) -> ReplicaMemory | None:
        """What the device holds."""
        return self._now.memory()

    def peak_bytes(self) -> int:
        """Most that tensors took since `reset_peak`."""
        return self._now.peak_bytes()

    def reset_peak(self) -> None:
        """Starts a new account of the peak."""
        self._now.reset_peak()

    def release_memory(self) -> None:
        """Gives back what failed work held."""
        self._now.release_memory()

    def compiling_s(self) -> float:
        """Seconds in which work on the replicas of now has waited for kernels."""
        return self._now.compiling_s()

    def add(self, job: NewJob) -> AddedJob:
        """Makes a job's state, and measures how long that takes."""
        with self._lock:
            begun_s = time.perf_counter()
            added = self._now.add(job)
            self._job_s = max(self._job_s, time.perf_counter() - begun_s)
            self._jobs[job.spec.name] = job
            return added

    def drop(self, job: str) -> None:
        """Forgets a job that has no seat."""
        with self._lock:
            if job in self._jobs:
                self._now.drop(job)
                del self._jobs[job]
            self._begun.discard(job)
            self._gone.discard(job)

    def seat(self, job: str) -> None:
        """Takes a job's state beside the backbone."""
        self._now.seat(job)
        self._begun.add(job)
        self._seated.add(job)

    def unseat(self, job: str) -> None:
        """Takes a job's state off the device."""
        self._now.unseat(job)
        self._seated.discard(job)

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        """Gives a job the state that `StateWork` once brought."""
        self._now.restore(job, tensors)
        self._begun.add(job)

    def rewind(self, job: str) -> None:
        """Forgets the gradients of a job's current global batch."""
        self._now.rewind(job)

    def keep_best(self, job: str) -> None:
        """Keeps a copy of a job's weights as the best so far."""
        self._now.keep_best(job)

    def use_best(self, job: str) -> None:
        """Puts the copy that was kept into the adapter."""
        self._now.use_best(job)

    def adapter_of(self, job: str) -> dict[str, tuple[torch.Tensor, ...]]:
        """The adapter's tensors of a job by module path."""
        return self._now.adapter_of(job)

    def target_names(self, job: str) -> list[str]:
        """The adapted modules in the words of PEFT's target_modules."""
        return self._now.target_names(job)

    def prepare(self, work: MicrobatchWork) -> None:
        """Makes ready what is likely to be started next."""
        self._now.prepare(work)

    def start(self, work: Work[OutcomeT]) -> Ticket[OutcomeT]:
        """Starts work; it is waited for before anything moves."""
        return self._now.start(work)

    def wait(self, ticket: Ticket[OutcomeT]) -> OutcomeT:
        """Waits for what was started."""
        return self._now.wait(ticket)

    def is_written(self, ticket: Ticket[None]) -> bool:
        """Whether waiting for files would take no time."""
        return self._now.is_written(ticket)

    def try_out(self, work: MicrobatchWork) -> TrialRun:
        """Runs a microbatch with stand-ins for its jobs."""
        return self._now.try_out(work)

    def recover(self, ended: Collection[str]) -> list[str]:
        """Has a lost replica made anew; what has ended and is gone with it does not move any more."""
        lost = self._now.recover(ended)
        self._seated.difference_update(lost)
        self._begun.difference_update(lost)
        self._gone.update(name for name in lost if name in ended)
        return lost

    def close(self) -> None:
        """Ends the replicas of now, if there are any."""
        if self._replicas is not None:
            self._replicas.close()
