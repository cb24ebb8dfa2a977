"""Runs programs and counts what they did: `ProgramRun` on any executor, `MicrobatchRun` on one device.

While a microbatch runs on the device, the host prepares what follows: the next microbatch of the program and, in a
thread, the next program. Both are exact: preparing a microbatch changes no job, so one that is not needed is dropped.
An asynchronous device gets the steps after a microbatch, and the microbatch after those, before the first is waited
for, so within a program it does not wait for the host. Steps then read on the device whether a loss was finite. All
started work is counted before anything else is decided.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.engine.events import Event, MicrobatchDone, StepDone
from weft.engine.execute.protocol import (
    Executor,
    MicrobatchExecutor,
    MicrobatchOutcome,
    MicrobatchWork,
    ReplicaFaultError,
    ReplicaMemoryError,
    Seats,
    StepOrder,
    StepsWork,
    Ticket,
    Worker,
)
from weft.engine.jobs.live_job import LiveJob
from weft.engine.lookahead import LookaheadPlanner
from weft.engine.timeline import TimelineRecorder
from weft.methods.registry import cost_ranks
from weft.plan.program import Step, Turn
from weft.plan.types import Limits, Microbatch

if TYPE_CHECKING:
    from weft.kernels.adamw import Updated

Begun = tuple[StepsWork, Ticket["Sequence[Updated]"]]


class ProgramRun(ABC):
    is_mid_step = False
    """True while started steps are not counted, so that a job may be further than its counts."""

    def __init__(
        self,
        executor: Executor,
        running: Sequence[LiveJob],
        plans: LookaheadPlanner,
        limits: Limits,
        row_tile: int,
        timeline: TimelineRecorder,
    ) -> None:
        self._executor = executor
        self._plans, self._limits, self._row_tile = plans, limits, row_tile
        self._timeline = timeline
        self._know({job.name: job for job in running})

    @property
    def is_under_way(self) -> bool:
        """True if work runs between two calls of `advance`, so that jobs may be further than their counts."""
        return False

    def continue_with(self, running: Sequence[LiveJob], limits: Limits) -> bool:
        """Trains these jobs from the next program on, within these limits; False if that needs another run."""
        return False

    @abstractmethod
    def next_jobs(self) -> list[str]:
        """Jobs that the next call of `advance` runs; empty at the end."""

    @abstractmethod
    def advance(self) -> list[Event]: ...

    @abstractmethod
    def finish(self) -> list[Event]:
        """Counts all started work, so that progress matches weights and gradients."""

    def _know(self, jobs: dict[str, LiveJob]) -> None:
        self._jobs = jobs
        self._plans.pace.ranks = {name: cost_ranks(job.spec.adapter).usual for name, job in jobs.items()}
        self._plans.pace.row_tile = self._row_tile

    def _count_step(self, job: str, learning_rate: float, updated: Updated, now_s: float) -> StepDone:
        progress = self._jobs[job].progress
        result = progress.finish_step(learning_rate, updated)
        return StepDone(
            job,
            step=progress.step,
            num_steps=progress.num_steps,
            epoch=progress.epoch,
            loss=result.means.loss,
            mean_token_accuracy=result.means.accuracy,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tokens=result.tokens,
            num_tokens=progress.num_tokens,
            seconds=now_s,
            skipped=result.skipped,
            metrics=result.means.further,
        )


class StartedMicrobatch:
    def __init__(self, executor: Worker, jobs: Sequence[LiveJob], work: MicrobatchWork) -> None:
        """`jobs`: the owners of its segments, in order."""
        self.microbatch = work.microbatch
        self._executor = executor
        self._owners = jobs
        self._rewinds = [job.progress.num_rewinds for job in jobs]
        compiled_s = executor.compiling_s()
        self.ticket = executor.start(work)
        self.started_s = time.perf_counter()
        self.compiling_s = executor.compiling_s() - compiled_s

    def seconds(self, outcome: MicrobatchOutcome) -> float:
        """Device seconds, without compilation."""
        if not self.compiling_s:
            return outcome.seconds
        return max(0.0, min(outcome.seconds, outcome.ended_s - self.started_s))

    def count(self) -> MicrobatchOutcome:
        """Waits for it and adds every segment's score to its job. A job rewound meanwhile counts its samples when they
        run again."""
        outcome, segments = self._executor.wait(self.ticket), self.microbatch.segments
        for job, before, segment, score in zip(self._owners, self._rewinds, segments, outcome.scores, strict=True):
            if job.progress.num_rewinds == before:
                job.progress.add_score(segment, score)
        return outcome


class MicrobatchRun(ProgramRun):
    def __init__(self, executor: Executor, running: Sequence[LiveJob], *given: Any) -> None:
        assert isinstance(executor, MicrobatchExecutor), "other executors bring a run of their own"
        super().__init__(executor, running, *given)
        self._prepare_ahead = executor.prepare
        self._has_foreseen = False
        self._rest = deque(self._plans.program([job.queue() for job in running], self._limits).turns)
        self._ready: MicrobatchWork | None = None
        self._ahead: StartedMicrobatch | None = None
        self._ahead_error: Exception | None = None
        """Error from starting it; raised when its turn comes."""

    def next_jobs(self) -> list[str]:
        if not self._rest:
            return []
        turn = self._rest[0]
        return list(dict.fromkeys([*turn.microbatch.job_tokens, *(step.job for step in turn.steps)]))

    def advance(self) -> list[Event]:
        if self._ahead_error is not None:
            error, self._ahead_error = self._ahead_error, None
            raise error
        turn = self._rest[0]
        done = self._run(turn) if turn.microbatch.segments else self._take(turn.steps, None)
        self._rest.popleft()
        return done

    def finish(self) -> list[Event]:
        if self._ahead_error is not None:
            # Half of its gradients may be written. The error will be raised again when it runs again.
            self._ahead_error = None
            for name in self._rest[0].microbatch.job_tokens:
                rewind(self._executor, self._jobs[name])
        if self._ahead is None:
            return []
        ahead, self._ahead = self._ahead, None
        return [self._count(ahead)]

    def _run(self, turn: Turn) -> list[Event]:
        current = self._ahead or self._start(turn.microbatch)
        self._ahead = None
        steps = turn.steps
        following = self._rest[1].microbatch if len(self._rest) > 1 else None
        self._meanwhile(following)
        begun = None
        if self._executor.facts.works_on:
            begun = self._begin(steps, current.ticket) if steps else None
            self._start_ahead(following)
        done = [self._count(current)]
        return [*done, *self._take(steps, begun)] if steps else done

    def _start(self, microbatch: Microbatch) -> StartedMicrobatch:
        work = MicrobatchWork(microbatch, self._row_tile)
        if self._ready != work:
            self._prepare(work)
        self._ready = None
        return StartedMicrobatch(self._executor, [self._jobs[segment.job] for segment in microbatch.segments], work)

    def _start_ahead(self, microbatch: Microbatch | None) -> None:
        if microbatch is None:
            return
        try:
            self._ahead = self._start(microbatch)
        except ReplicaFaultError:
            raise
        except ReplicaMemoryError:
            # A new error: the traceback of the old one would hold on to tensors.
            self._ahead_error = ReplicaMemoryError("the memory ended while the microbatch was started ahead")
        except Exception as error:
            self._ahead_error = error

    def _count(self, current: StartedMicrobatch) -> Event:
        microbatch, plans = current.microbatch, self._plans
        shares = microbatch.job_tokens
        predicted_s = plans.pace.fit.predict(plans.pace.load(microbatch))
        outcome = current.count()
        known = {} if predicted_s is None else {"predicted_s": predicted_s}
        args = {"tokens": microbatch.num_tokens, "jobs": shares, "rows": outcome.num_rows, **known}
        if current.compiling_s:
            self._timeline.add("compile", current.compiling_s, current.started_s)
        seconds = current.seconds(outcome)
        self._timeline.add("forward_backward", seconds, outcome.ended_s, **args)
        plans.observe(microbatch, seconds)
        return MicrobatchDone(
            tuple(shares), microbatch.num_tokens, outcome.num_rows, seconds, outcome.num_reference_rows
        )

    def _meanwhile(self, following: Microbatch | None) -> None:
        if following is not None:
            self._prepare(MicrobatchWork(following, self._row_tile))
        if not self._has_foreseen:
            self._has_foreseen = True
            queues = [job.queue_after(self._until_an_end()) for job in self._jobs.values()]
            self._plans.foresee([queue for queue in queues if queue is not None], self._limits)

    def _until_an_end(self) -> list[Turn]:
        """Turns until other jobs train: all, or up to the steps with which a job ends or is held, and what starts
        meanwhile."""
        turns = list(self._rest)
        for index, turn in enumerate(turns, start=1):
            if any(step.step + 1 == self._jobs[step.job].progress.hold_step for step in turn.steps):
                begun = turns[index : index + self._executor.facts.works_on]
                return [*turns[:index], *(Turn(later.microbatch) for later in begun)]
        return turns

    def _prepare(self, work: MicrobatchWork) -> None:
        with self._timeline.span("prepare"):
            self._prepare_ahead(work)
        self._ready = work

    def _begin(self, steps: Sequence[Step], behind: Ticket[MicrobatchOutcome] | None) -> Begun:
        due = [self._jobs[step.job].progress for step in steps]
        orders = [
            StepOrder(step.job, progress.learning_rate(), progress.is_finite)
            for step, progress in zip(steps, due, strict=True)
        ]
        work = StepsWork(tuple(orders), behind)
        ticket = self._executor.start(work)
        self.is_mid_step = True
        return work, ticket

    def _take(self, steps: Sequence[Step], begun: Begun | None) -> list[Event]:
        with self._timeline.span("step", jobs={step.job: 0 for step in steps}):
            work, ticket = begun or self._begin(steps, None)
            found = self._executor.wait(ticket)
        done: list[Event] = [
            self._count_step(order.job, order.learning_rate, updated, self._timeline.now())
            for order, updated in zip(work.steps, found, strict=True)
        ]
        self.is_mid_step = False
        return done


def rewind(seats: Seats, job: LiveJob) -> None:
    job.progress.rewind()
    seats.rewind(job.name)
