"""A job in the engine: its specification and data, how far it has come, and where it stands.

Its tensors are the executor's. Its progress changes by its own methods, its status by `JobTransitions`, and
its finished steps by `StepFinisher`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weft.data.dataset import JobData
from weft.engine.jobs.progress import JobProgress
from weft.job_state import JobState, Reason, ReasonCode
from weft.objectives.objective import MeanScores
from weft.plan.program import Turn
from weft.plan.types import JobQueue
from weft.spec import JobSpec


@dataclass(frozen=True)
class EvalResult:
    step: int
    means: MeanScores
    seconds: float
    """This job's share of the time."""


@dataclass(frozen=True)
class JobStatus:
    state: JobState = JobState.QUEUED
    reason: Reason | None = None
    has_started: bool = False
    """True if it has had a seat in this engine, so that memory has its state."""
    wait_reported: bool = False
    is_closing: bool = False
    """True if it has done all its steps, and only its files are still written."""


@dataclass
class FinishedSteps:
    """The last step at which each kind of due work was done; only `StepFinisher` writes it."""

    last: int = 0
    """Last step at which all due work was done: metrics, evaluation, checkpoint, adapter."""
    evaluated: int = 0
    saved: int = 0
    saved_s: float = 0.0
    """Time of the last checkpoint, or of the job's start here, in seconds of this process."""
    checkpoint_is_overdue: bool = False
    """True if a due checkpoint could not be written."""
    evaluating: int | None = None
    """Step whose evaluation is under way; only `Evaluations` writes it."""
    pending_eval: EvalResult | None = None


class LiveJob:
    def __init__(self, spec: JobSpec, data: JobData, *, submitted: JobSpec | None = None) -> None:
        self.spec = spec
        self.submitted = submitted or spec
        """The job as its owner wrote it, before `init_adapter` completed its adapter."""
        self.data = data
        self.progress = JobProgress(spec, data)
        self.status = JobStatus()
        self.finished = FinishedSteps()
        self.is_suspect = False
        """True if a microbatch that it shared raised; its next step runs alone."""
        self.num_parameters = 0
        self.num_reference_parameters = 0
        self.reference_bytes = sum(part.reference_bytes for part in (data.train, data.eval) if part is not None)
        self.kernel_bytes = 0
        self.lane = ""
        """Lane of the job; only jobs of the same lane share microbatches."""
        self.home: int | None = None if spec.gradient_sum == "any_order" else 0
        """Replica that it trains on; None: on all of them."""
        self.has_home_replica = False
        self.begun_step: int | None = None
        """Step that stages have already begun to reach: weights may be ahead of `step`."""
        self.kept_step: int | None = None
        """Step of which stages keep a copy of its state."""
        self.evaluated_tokens = 0
        self.notes: tuple[str, ...] = ()
        self.longest = max(part.longest_group for part in (data.train, data.eval) if part is not None)
        """Tokens of the longest sample, or of the longest group that shares a microbatch, with evaluation data."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_short_of_storage(self) -> bool:
        """True if it has trained and is paused because a write failed."""
        return self.status.has_started and self.reason is not None and self.reason.code is ReasonCode.STORAGE

    @property
    def state(self) -> JobState:
        return self.status.state

    @property
    def reason(self) -> Reason | None:
        return self.status.reason

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def num_steps(self) -> int:
        return self.progress.num_steps

    @cached_property
    def step_tokens(self) -> float:
        return self.progress.order.num_tokens(self.data.train.group_tokens) / self.num_steps

    @property
    def num_tokens(self) -> int:
        return self.progress.num_tokens

    @property
    def inputs(self) -> Mapping[str, Any]:
        return self.progress.inputs

    @property
    def best_eval(self) -> float | None:
        return self.progress.best_eval

    @property
    def is_running(self) -> bool:
        return self.state is JobState.RUNNING and not self.status.is_closing

    @property
    def is_alive(self) -> bool:
        """True if it may still be trained."""
        return not (self.state.is_final or self.status.is_closing)

    @property
    def is_step_finished(self) -> bool:
        return self.finished.last == self.step

    @property
    def is_evaluated(self) -> bool:
        """True if the evaluation after the last step is done and its event pending."""
        return self.finished.pending_eval is not None and self.finished.pending_eval.step == self.step

    @property
    def is_evaluating(self) -> bool:
        """True if the evaluation after the last step is under way: the job trains again after it."""
        return self.is_running and self.finished.evaluating == self.step

    @property
    def may_end(self) -> bool:
        return self.is_eval_due() or self.progress.diverged is not None or self.progress.is_complete

    @property
    def has_best(self) -> bool:
        return self.progress.has_best

    def queue(self) -> JobQueue:
        return replace(self.progress.queue(self.spec.priority, self.lane), home=self.home)

    def queue_after(self, turns: list[Turn]) -> JobQueue | None:
        """Queue after these turns; None if the job has ended then."""
        queue = self.progress.queue_after(turns, self.spec.priority, self.lane)
        return None if queue is None else replace(queue, home=self.home)

    def queue_until_due(self) -> JobQueue:
        """Queue up to the step after which it is evaluated or saved."""
        return self._until_due(self.queue())

    def queue_until_due_after(self, turns: list[Turn]) -> JobQueue | None:
        queue = self.queue_after(turns)
        return None if queue is None else self._until_due(queue)

    def _until_due(self, queue: JobQueue) -> JobQueue:
        every = [self.spec.save_steps]
        every += [] if self.data.eval is None else [self._eval_every]
        step = queue.batches[0].step
        due = min(step + n - step % n for n in every)
        return replace(queue, batches=tuple(batch for batch in queue.batches if batch.step < due))

    @property
    def _eval_every(self) -> int:
        return self.spec.eval_steps or self.progress.order.steps_per_epoch

    def is_eval_due(self) -> bool:
        return self.finished.evaluated != self.step and self.is_eval_due_at(self.step)

    def is_eval_due_at(self, step: int) -> bool:
        return self.data.eval is not None and (step % self._eval_every == 0 or step == self.num_steps)

    def is_save_due(self, own_s: float) -> bool:
        """True if a checkpoint is due after the last step; `own_s`: seconds this process has run."""
        if self.begun_step is not None and self.kept_step != self.step:
            # Its weights are already of a later step.
            return False
        if self.finished.checkpoint_is_overdue:
            return True
        return self.finished.saved != self.step and (self.progress.is_complete or self.is_save_due_at(self.step, own_s))

    def is_save_due_at(self, step: int, own_s: float) -> bool:
        minutes = self.spec.save_minutes
        is_old = minutes > 0 and own_s - self.finished.saved_s >= 60 * minutes
        return is_old or step % self.spec.save_steps == 0
