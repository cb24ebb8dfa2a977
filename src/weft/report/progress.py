"""Counts the progress of a run from its events, for the terminal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.engine.events import (
    EvalDone,
    Event,
    JobEnded,
    JobEvent,
    JobPaused,
    JobPreempted,
    JobResumed,
    JobStarted,
    JobWaiting,
    MicrobatchDone,
    StepDone,
)
from weft.job_state import JobState

RATE_WINDOW_S = 30.0
"""Rates are those of the last half minute."""
MAX_MARKS = 512
STATES: Mapping[type[Event], JobState] = {
    JobStarted: JobState.RUNNING,
    JobResumed: JobState.RUNNING,
    StepDone: JobState.RUNNING,
    JobPaused: JobState.PAUSED,
    JobWaiting: JobState.QUEUED,
    JobPreempted: JobState.QUEUED,
}
"""The state a job is in after an event that does not end it."""


class Rate:
    """Amounts per second over a recent window."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=MAX_MARKS)

    def add(self, seconds: float, amount: float) -> None:
        """Adds an amount that was complete at `seconds`."""
        self._marks.append((seconds, amount))
        while self._marks[0][0] < seconds - RATE_WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()

    @property
    def per_s(self) -> float | None:
        """The rate, or None before two moments are known."""
        if not self._marks:
            return None
        (first, _), (last, _) = self._marks[0], self._marks[-1]
        # What was complete at the first moment was made before it.
        return sum(amount for at, amount in self._marks if at > first) / (last - first) if last > first else None


@dataclass
class ReportedProgress:
    """Progress of one job."""

    name: str
    num_steps: int
    state: JobState = JobState.QUEUED
    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    tokens: Rate = field(default_factory=Rate)
    steps: Rate = field(default_factory=Rate)
    _means: tuple[float, float] | None = None
    """Quick and slow running means of the loss."""

    def step_done(self, event: StepDone) -> None:
        self.steps.add(event.seconds, event.step - self.step)
        self.tokens.add(event.seconds, event.tokens)
        self.step, self.num_steps = event.step, event.num_steps
        self.learning_rate, self.loss = event.learning_rate, event.loss
        if not math.isnan(self.loss):  # a NaN must not stay in the means
            quick, slow = self._means or (self.loss, self.loss)
            self._means = (quick + 0.3 * (self.loss - quick), slow + 0.08 * (self.loss - slow))

    @property
    def trend(self) -> int:
        """-1 while the loss falls, 1 while it rises, 0 while it does neither by more than one per cent."""
        if self._means is None:
            return 0
        quick, slow = self._means
        margin = 0.01 * abs(slow)
        return -1 if quick < slow - margin else 1 if quick > slow + margin else 0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the present rate; None without a rate."""
        pace = self.steps.per_s
        return (self.num_steps - self.step) / pace if pace and self.state is JobState.RUNNING else None


class RunProgress:
    """Progress of the whole run."""

    def __init__(self, jobs: Sequence[tuple[str, int]]) -> None:
        self.jobs = {name: ReportedProgress(name, num_steps) for name, num_steps in jobs}
        self._filled = self._rows = 0.0

    def apply(self, event: Event) -> ReportedProgress | None:
        """Counts one event and returns its job, if it has one."""
        if isinstance(event, MicrobatchDone):
            self._filled += event.tokens
            self._rows += event.rows
        if not isinstance(event, JobEvent):
            return None
        job = self.jobs.setdefault(event.job, ReportedProgress(event.job, 0))
        job.state = event.state if isinstance(event, JobEnded) else STATES.get(type(event), job.state)
        if isinstance(event, StepDone):
            job.step_done(event)
        elif isinstance(event, EvalDone):
            job.eval_loss = event.eval_loss
        elif isinstance(event, JobStarted):
            job.step, job.num_steps = event.step, event.num_steps
        return job

    @property
    def tokens_per_s(self) -> float | None:
        """Sum of the rates of the running jobs; None before one has taken two steps."""
        # Jobs step together: one count of all their tokens would take the first time they do for a rush.
        rates = [job.tokens.per_s for job in self.jobs.values() if job.state is JobState.RUNNING]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    @property
    def fill(self) -> float | None:
        """Fraction of all microbatch rows that held tokens, 0 to 1."""
        return self._filled / self._rows if self._rows else None

    def count(self, state: str) -> int:
        """Number of jobs in a state."""
        return sum(1 for job in self.jobs.values() if job.state == state)
