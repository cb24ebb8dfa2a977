"""Runs one program. While a microbatch runs on the device, the host prepares what follows it.

That is the next microbatch of the program and, in a thread of its own, the next program. Both are exact: making a
microbatch ready changes no job, so one that is not needed after all is just dropped. A device that works on by itself
gets the steps behind a microbatch, and the microbatch behind those, before the first is waited for: within a program it
does not wait for the host. Steps then learn on the device whether a loss was finite, and what has been started is
always counted before anything else is decided.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.engine.events import Event, MicrobatchDone, StepDone
from weft.engine.execute.protocol import (
    Executor,
    MicrobatchOutcome,
    MicrobatchWork,
    ReplicaFaultError,
    ReplicaMemoryError,
    StepOrder,
    StepsWork,
    Ticket,
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
"""Steps that have been started."""


class StartedMicrobatch:
    """A microbatch that the executor has started and nobody has counted."""

    def __init__(self, executor: Executor, jobs: Sequence[LiveJob], work: MicrobatchWork) -> None:
        """`jobs`: the owners of its segments, in order."""
        self.microbatch = work.microbatch
        self._executor = executor
        self._owners = jobs
        self._rewinds = [job.progress.num_rewinds for job in jobs]
        compiled_s = executor.compiling_s()
        self.ticket = executor.start(work)
        self.started_s = time.perf_counter()
        self.compiling_s = executor.compiling_s() - compiled_s
        """How long its start waited for kernels, or for the capture of a graph."""

    def seconds(self, outcome: MicrobatchOutcome) -> float:
        """How long the device took for it, less what was compiled before it got going."""
        if not self.compiling_s:
            return outcome.seconds
        return max(0.0, min(outcome.seconds, outcome.ended_s - self.started_s))

    def count(self) -> MicrobatchOutcome:
        """Waits for it and adds every segment's score to its job.

        A job that has gone back to its last step in the meantime runs its samples again, and counts them then.
        """
        outcome, segments = self._executor.wait(self.ticket), self.microbatch.segments
        for job, before, segment, score in zip(self._owners, self._rewinds, segments, outcome.scores, strict=True):
            if job.progress.num_rewinds == before:
                job.progress.add_score(segment, score)
        return outcome


class ProgramRun:
    """Runs one program: microbatches one by one, steps that follow each other together."""

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
        self._jobs = {job.spec.name: job for job in running}
        self._plans = plans
        self._limits = limits
        self._row_tile = row_tile
        self._timeline = timeline
        plans.pace.ranks = {job.spec.name: cost_ranks(job.spec.adapter).usual for job in running}
        plans.pace.row_tile = row_tile
        self._has_foreseen = False
        self._rest = deque(plans.program([job.queue() for job in running], limits).turns)
        self._ready: MicrobatchWork | None = None
        """What the executor was told to make ready."""
        self._ahead: StartedMicrobatch | None = None
        """The microbatch that is next, where it has been started already."""
        self._ahead_error: Exception | None = None
        """What starting it raised; it is raised when its turn has come."""
        self.is_mid_step = False
        """Steps have been started and not counted, so a job may be ahead of what is known of it."""

    @property
    def goes_on(self) -> bool:
        """What has been started is counted before anything else is decided."""
        return False

    def next_jobs(self) -> list[str]:
        """The jobs that the next call of `advance` is about; none at the end."""
        if not self._rest:
            return []
        turn = self._rest[0]
        return list(dict.fromkeys([*turn.microbatch.job_tokens, *(step.job for step in turn.steps)]))

    def advance(self) -> list[Event]:
        """Runs the next microbatch with the steps behind it, or only steps that are due; says what has been done."""
        if self._ahead_error is not None:
            error, self._ahead_error = self._ahead_error, None
            raise error
        turn = self._rest[0]
        done = self._run(turn) if turn.microbatch.segments else self._take(turn.steps, None)
        self._rest.popleft()
        return done

    def finish(self) -> list[Event]:
        """Counts what has been started, so that jobs stand where their gradients do; nothing may come in between."""
        if self._ahead_error is not None:
            # Half of its gradients may be written. What was raised will be raised again when it is run again.
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
            # A new one: that one's traceback would hold on to the tensors of what failed.
            self._ahead_error = ReplicaMemoryError("the memory ended while the microbatch was started ahead")
        except Exception as error:
            self._ahead_error = error

    def _count(self, current: StartedMicrobatch) -> Event:
        """Waits for a microbatch and learns from it."""
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
        """What runs before the jobs that train are others: all, or up to the steps with which a job ends or holds, and
        what is started before they are known to be done."""
        turns = list(self._rest)
        for place, turn in enumerate(turns, start=1):
            if any(step.step + 1 == self._jobs[step.job].progress.hold_step for step in turn.steps):
                begun = turns[place : place + self._executor.facts.works_on]
                return [*turns[:place], *(Turn(later.microbatch) for later in begun)]
        return turns

    def _prepare(self, work: MicrobatchWork) -> None:
        with self._timeline.span("prepare"):
            self._executor.prepare(work)
        self._ready = work

    def _begin(self, steps: Sequence[Step], behind: Ticket[MicrobatchOutcome] | None) -> Begun:
        """Starts steps, each with the learning rate that is due."""
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
        """Waits for steps, which it starts if nobody has."""
        with self._timeline.span("step", jobs={step.job: 0 for step in steps}):
            work, ticket = begun or self._begin(steps, None)
            found = self._executor.wait(ticket)
        done: list[Event] = [
            count_step(self._jobs[order.job], order.learning_rate, updated, self._timeline.now())
            for order, updated in zip(work.steps, found, strict=True)
        ]
        self.is_mid_step = False
        return done


def count_step(job: LiveJob, learning_rate: float, updated: Updated, now_s: float) -> StepDone:
    """Counts a step that has been taken, or left out, by now."""
    progress = job.progress
    result = progress.finish_step(learning_rate, updated)
    return StepDone(
        job.name,
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


def rewind(executor: Executor, job: LiveJob) -> None:
    """Takes a job back to its last step boundary: what has run of its global batch is forgotten."""
    job.progress.rewind()
    executor.rewind(job.name)
