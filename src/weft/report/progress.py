"""Keeps count of a run while it trains: from events to what the terminal shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RATE_WINDOW_S = 30.0
"""Rates are those of the last half minute."""
MAX_MARKS = 512
STATES = {
    "job_started": "running",
    "resumed": "running",
    "step": "running",
    "paused": "paused",
    "waiting": "queued",
    "preempted": "queued",
    "cancelled": "cancelled",
    "failed": "failed",
    "succeeded": "succeeded",
}
"""The state a job is in after an event."""


class Rate:
    """Amounts per second over a recent window."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=MAX_MARKS)

    def add(self, seconds: float, amount: float) -> None:
        """Counts an amount that was complete at a time."""
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
class JobProgress:
    """Where one job stands."""

    name: str
    num_steps: int
    state: str = "queued"
    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    tokens: Rate = field(default_factory=Rate)
    steps: Rate = field(default_factory=Rate)
    _means: tuple[float, float] | None = None
    """A quick and a slow running mean of the loss."""

    def step_done(self, fields: Mapping[str, Any]) -> None:
        """Counts one optimizer step."""
        seconds = float(fields.get("seconds", 0.0))
        done = int(fields.get("step", self.step + 1))
        self.steps.add(seconds, done - self.step)
        self.tokens.add(seconds, float(fields.get("tokens", 0)))
        self.step = done
        self.num_steps = int(fields.get("num_steps") or self.num_steps)
        self.learning_rate = fields.get("learning_rate", self.learning_rate)
        self.loss = fields.get("loss")
        if self.loss is not None and self.loss == self.loss:  # a NaN must not stay in the means
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
        """Seconds to the last step at the present pace; None when there is none."""
        pace = self.steps.per_s
        return (self.num_steps - self.step) / pace if pace and self.state == "running" else None


class RunProgress:
    """Where the whole run stands."""

    def __init__(self, jobs: Sequence[tuple[str, int]]) -> None:
        self.jobs = {name: JobProgress(name, num_steps) for name, num_steps in jobs}
        self.tokens = Rate()
        self._filled = self._rows = 0.0

    def apply(self, kind: str, fields: Mapping[str, Any]) -> JobProgress | None:
        """Counts one event and returns the job it is about; kinds that change nothing here are fine."""
        if kind == "microbatch":
            self._filled += float(fields.get("tokens", 0))
            self._rows += float(fields.get("rows", 0))
        name = fields.get("job")
        # A microbatch is about many jobs at once, whatever it says.
        if name is None or kind == "microbatch":
            return None
        job = self.jobs.setdefault(name, JobProgress(name, int(fields.get("num_steps") or 0)))
        job.state = STATES.get(kind, job.state)
        if kind == "step":
            job.step_done(fields)
            self.tokens.add(float(fields.get("seconds", 0.0)), float(fields.get("tokens", 0)))
        elif kind == "eval":
            job.eval_loss = fields.get("eval_loss")
        elif kind == "job_started":
            job.num_steps = int(fields.get("num_steps") or job.num_steps)
            job.step = int(fields.get("step") or 0)
        return job

    @property
    def fill(self) -> float | None:
        """The part of all microbatch rows that held tokens, 0 to 1."""
        return self._filled / self._rows if self._rows else None

    def count(self, state: str) -> int:
        """Jobs in a state."""
        return sum(1 for job in self.jobs.values() if job.state == state)
