"""A job in the engine: its specification and data, how far it has come, and where it stands.

Its tensors are the executor's. Its progress is changed by its own methods, its status by `JobTransitions`, and what is
settled by `Settlement`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from weft.data.dataset import JobData
from weft.engine.jobs.progress import JobProgress
from weft.job_state import JobState, Reason, ReasonCode
from weft.objectives.metrics import MeanScores
from weft.plan.program import Turn
from weft.plan.types import JobQueue
from weft.spec import JobSpec


@dataclass(frozen=True)
class EvalResult:
    """An evaluation that is done but has not been told yet."""

    step: int
    means: MeanScores
    seconds: float
    """Its share of the time."""


@dataclass(frozen=True)
class JobStatus:
    """Where a job stands; `JobTransitions` alone replaces it."""

    state: JobState = JobState.QUEUED
    reason: Reason | None = None
    has_started: bool = False
    """It has had a seat in this engine, so its state is the one in memory."""
    wait_reported: bool = False
    """Its owner has been told that it waits."""
    is_closing: bool = False
    """It has done all its steps and given up its place; what is left is that its files are written."""


@dataclass
class FinishedSteps:
    """The last step after which each thing that is due has been done; `Settlement` writes it as it does them."""

    last: int = 0
    """Everything: metrics, evaluation, checkpoint, adapter."""
    evaluated: int = 0
    saved: int = 0
    saved_s: float = 0.0
    """When the checkpoint was begun, or the job started here: seconds of this process."""
    checkpoint_is_overdue: bool = False
    """One that was due could not be written."""
    untold: EvalResult | None = None
    """The evaluation after the last step, if it was done together with others."""


class LiveJob:
    """One job of an engine."""

    def __init__(self, spec: JobSpec, data: JobData, *, submitted: JobSpec | None = None) -> None:
        self.spec = spec
        self.submitted = submitted or spec
        """The job as its owner wrote it: without what `init_adapter` says of the adapter."""
        self.data = data
        self.progress = JobProgress(spec, data)
        self.status = JobStatus()
        self.settled = FinishedSteps()
        self.is_suspect = False
        """A microbatch raised in which it took part with others; it runs its next step alone."""
        self.num_parameters = 0
        """That are trained, once the executor knows the job."""
        self.num_reference_parameters = 0
        """Of the frozen adapter that it compares with."""
        self.reference_bytes = sum(part.reference_bytes for part in (data.train, data.eval) if part is not None)
        """What is kept of what its reference says."""
        self.kernel_bytes = 0
        """What kernels hold of it besides a copy of those; the executor knows."""
        self.lane = ""
        """It shares microbatches only with jobs of the same lane; the executor knows which."""
        self.home: int | None = None if spec.gradient_sum == "any_order" else 0
        """The replica that it trains on, of several; None: on all of them."""
        self.has_home_replica = False
        """Whether that replica was chosen for it."""
        self.begun_step: int | None = None
        """Where stages have begun further steps, the one it will stand at then: its weights may be ahead."""
        self.kept_step: int | None = None
        """The step of which stages keep a copy of its state."""
        self.notes: tuple[str, ...] = ()
        """What its owner should know before it starts."""
        self.longest = max(part.longest_group for part in (data.train, data.eval) if part is not None)
        """Tokens of the longest sample, or of the longest group that shares a microbatch, evaluation included."""

    @property
    def name(self) -> str:
        """The job's name in this engine."""
        return self.spec.name

    @property
    def is_short_of_storage(self) -> bool:
        """It has trained, and waits because something about it could not be written."""
        return self.status.has_started and self.reason is not None and self.reason.code is ReasonCode.STORAGE

    @property
    def state(self) -> JobState:
        """Where it stands."""
        return self.status.state

    @property
    def reason(self) -> Reason | None:
        """Why it stands there."""
        return self.status.reason

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self.progress.num_steps

    @cached_property
    def step_tokens(self) -> float:
        """Tokens of a global batch, on average over the whole job."""
        return self.progress.order.num_tokens(self.data.train.group_tokens) / self.num_steps

    @property
    def num_tokens(self) -> int:
        """Tokens trained, whole global batches only."""
        return self.progress.num_tokens

    @property
    def best_eval(self) -> float | None:
        """The lowest evaluation loss so far."""
        return self.progress.best_eval

    @property
    def is_running(self) -> bool:
        """It trains, or is about to: it has not ended, and waits neither for a place nor for its files."""
        return self.state is JobState.RUNNING and not self.status.is_closing

    @property
    def is_alive(self) -> bool:
        """It may still be trained."""
        return not (self.state.is_final or self.status.is_closing)

    @property
    def is_settled(self) -> bool:
        """Everything is done that belongs after its last step."""
        return self.settled.last == self.step

    @property
    def is_evaluated(self) -> bool:
        """The evaluation after the last step is done, but not yet told."""
        return self.settled.untold is not None and self.settled.untold.step == self.step

    @property
    def may_end(self) -> bool:
        """What its last step leaves to do is not all done, and may end it."""
        return self.is_eval_due() or self.progress.diverged is not None or self.progress.is_complete

    @property
    def has_best(self) -> bool:
        """Whether the weights of its best evaluation are kept."""
        return self.progress.has_best

    def queue(self) -> JobQueue:
        """The job's next global batches, for a planner."""
        return replace(self.progress.queue(self.spec.priority, self.lane), home=self.home)

    def queue_after(self, turns: list[Turn]) -> JobQueue | None:
        """The queue once these have run too; None if the job has ended then."""
        queue = self.progress.queue_after(turns, self.spec.priority, self.lane)
        return None if queue is None else replace(queue, home=self.home)

    def queue_until_due(self) -> JobQueue:
        """The job's next global batches up to the step after which it is evaluated or saved."""
        return self._until_due(self.queue())

    def queue_until_due_after(self, turns: list[Turn]) -> JobQueue | None:
        """The same once these have run too; None if the job has ended then."""
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
        """An evaluation belongs after the last step and is not done yet."""
        return self.settled.evaluated != self.step and self.is_eval_due_at(self.step)

    def is_eval_due_at(self, step: int) -> bool:
        """An evaluation belongs after a step."""
        return self.data.eval is not None and (step % self._eval_every == 0 or step == self.num_steps)

    def is_save_due(self, own_s: float) -> bool:
        """A checkpoint belongs after the last step and is not written yet; this process has run for `own_s`."""
        if self.begun_step is not None and self.kept_step != self.step:
            # Its weights are not of this step any more.
            return False
        if self.settled.checkpoint_is_overdue:
            return True
        return self.settled.saved != self.step and (self.progress.is_complete or self.is_save_due_at(self.step, own_s))

    def is_save_due_at(self, step: int, own_s: float) -> bool:
        """A checkpoint belongs after a step, or one is due by the clock."""
        minutes = self.spec.save_minutes
        is_old = minutes > 0 and own_s - self.settled.saved_s >= 60 * minutes
        return is_old or step % self.spec.save_steps == 0
