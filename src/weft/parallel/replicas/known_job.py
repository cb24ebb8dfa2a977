"""What a controller knows of a job that is trained elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from weft.data.dataset import JobData
from weft.engine.events import CheckpointSaved, EvalDone, JobEnded, JobEvent, JobFailed, JobPaused, JobStarted, StepDone
from weft.engine.jobs.live_job import LiveJob
from weft.job_state import JobState, Reason, ReasonCode
from weft.parallel.replicas.messages import JobOrder, JobView
from weft.plan.admit import Applicant
from weft.spec import JobSpec


@dataclass
class JobRecord:
    """A job of a controller: what was asked for, where it is, and what its rank has told of it."""

    order: JobOrder
    data: JobData
    arrival: int
    """Place in the order of submission."""
    num_steps: int
    longest: int
    num_parameters: int = 0
    num_bytes: int = 0
    """That it takes where it has a place, as a rank has counted."""
    notes: tuple[str, ...] = ()
    state: JobState = JobState.QUEUED
    reason: Reason | None = None
    step: int = 0
    saved_step: int = 0
    """That of its last checkpoint."""
    num_tokens: int = 0
    best_eval: float | None = None
    has_started: bool = False
    hold_step: int | None = None
    rank: int | None = None
    """Where it is trained; after its end, where it was."""
    is_leaving: bool = False
    """Its rank has been asked to let go of it."""
    wait_reported: bool = False
    """Its owner has been told that it waits."""
    is_parked: bool = False
    """Its owner lets it wait without a place."""
    is_cancelled: bool = False
    """Its owner has taken it off; its rank is about to know."""
    shown_step: int = 0
    """The last step that its owner knows of."""
    may_end: bool = False
    """What the last step that its owner knows of leaves to do may end it."""
    has_best: bool = False
    """The weights of its best evaluation are kept."""

    @classmethod
    def of(cls, order: JobOrder, data: JobData, arrival: int) -> JobRecord:
        """A job that nobody has checked."""
        plan = LiveJob(order.spec, data)
        return cls(order, data, arrival, plan.num_steps, plan.longest)

    @property
    def spec(self) -> JobSpec:
        """What was asked for."""
        return self.order.spec

    @property
    def name(self) -> str:
        """The job's name."""
        return self.spec.name

    @property
    def is_short_of_storage(self) -> bool:
        """It waits because something about it could not be written."""
        return self.reason is not None and self.reason.code is ReasonCode.STORAGE

    @property
    def wants_rank(self) -> bool:
        """It trains, or would like to."""
        return self.state in (JobState.QUEUED, JobState.RUNNING)

    @property
    def is_held(self) -> bool:
        """It has taken all the steps that it may take for now."""
        return self.hold_step is not None and self.step >= self.hold_step

    @property
    def tokens_left(self) -> float:
        """That it still has to be trained on, about."""
        mean = self.data.train.summary.num_tokens / max(1, self.data.train.num_groups)
        return (self.num_steps - self.step) * self.spec.batch_size * mean

    @property
    def applicant(self) -> Applicant:
        """What admission knows of it."""
        return Applicant(self.name, self.arrival, self.num_bytes, self.spec.priority, self.spec.tenant)

    def rank_lost(self, step: int) -> None:
        """It has no rank any more, and goes on from this step wherever there is one, unless it has ended or waits."""
        self.rank, self.is_leaving = None, False
        if self.state in (JobState.RUNNING, JobState.QUEUED):
            self.state, self.step = JobState.PAUSED if self.is_parked else JobState.QUEUED, step

    def show(self, view: JobView) -> None:
        """From now on its owner knows what was told with this."""
        self.shown_step, self.may_end, self.has_best = view.step, view.may_end, view.has_best

    def hear(self, event: JobEvent, view: JobView | None = None) -> None:
        """Takes note of what happened to it, and of how it stood then."""
        if view is not None:
            self.num_tokens = view.num_tokens
        match event:
            case JobStarted(_, step):
                self.state, self.reason, self.step, self.saved_step = JobState.RUNNING, None, step, step
                self.has_started, self.wait_reported = True, False
            case StepDone():
                self.step, self.num_tokens = event.step, event.num_tokens
            case EvalDone() if event.is_best:
                self.best_eval = event.eval_loss
            case CheckpointSaved():
                self.saved_step = event.step
            case JobPaused():
                self.state, self.reason, self.step = JobState.PAUSED, event.reason, event.step
                self.is_leaving = False
            case JobEnded():
                self.state, self.step, self.is_leaving = event.state, event.step, False
                self.reason = event.reason if isinstance(event, JobFailed) else None
