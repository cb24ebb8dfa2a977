"""Events: plain values that report, in order, what happens while the engine runs."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from weft.errors import counted
from weft.job_state import JobState, Reason, ReasonCode


@dataclass(frozen=True, slots=True)
class Event:
    kind: ClassVar[str] = "event"

    def fields(self) -> dict[str, Any]:
        """Values by name, with further metrics among them."""
        values = dataclasses.asdict(self)
        return {**values, **values.pop("metrics", {})}


@dataclass(frozen=True, slots=True)
class JobEvent(Event):
    job: str


@dataclass(frozen=True, slots=True)
class JobStarted(JobEvent):
    kind: ClassVar[str] = "job_started"
    step: int
    """Steps already done; above 0 after a resume."""
    num_steps: int


@dataclass(frozen=True, slots=True)
class JobWaiting(JobEvent):
    """There is no room for the job yet; it starts, or continues, as soon as there is."""

    kind: ClassVar[str] = "waiting"
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class JobPreempted(JobEvent):
    """Another job needs the room first; this one waits at its last step and continues later."""

    kind: ClassVar[str] = "preempted"
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class StepDone(JobEvent):
    kind: ClassVar[str] = "step"
    step: int
    num_steps: int
    epoch: float
    loss: float
    """Mean over the supervised tokens of the global batch."""
    mean_token_accuracy: float
    """Share of those tokens for which no other token had a larger logit."""
    grad_norm: float
    learning_rate: float
    tokens: int
    num_tokens: int
    seconds: float
    skipped: bool = False
    """True if the loss or gradient was not finite, so that the weights did not change."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalDone(JobEvent):
    kind: ClassVar[str] = "eval"
    step: int
    epoch: float
    eval_loss: float
    eval_mean_token_accuracy: float
    eval_runtime: float
    is_best: bool
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the objective; their names begin with eval_."""


COMMON_VALUES = frozenset(
    {field.name for kind in (StepDone, EvalDone) for field in dataclasses.fields(kind)} | {"time"}
)
"""Values of every step and evaluation; `time` is the name of `seconds` in metrics.jsonl."""


def own_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of the objective alone, from an event's values or a line of metrics.jsonl."""
    return {name: value for name, value in values.items() if name not in COMMON_VALUES}


@dataclass(frozen=True, slots=True)
class CheckpointSaved(JobEvent):
    kind: ClassVar[str] = "checkpoint"
    step: int


@dataclass(frozen=True, slots=True)
class JobPaused(JobEvent):
    """The job keeps its state and does not train until resumed."""

    kind: ClassVar[str] = "paused"
    step: int
    reason: Reason | None = None

    @property
    def is_requested(self) -> bool:
        """False if something prevents the job from training."""
        return self.reason is None or self.reason.code is ReasonCode.RUN_STOPPED


@dataclass(frozen=True, slots=True)
class JobResumed(JobEvent):
    kind: ClassVar[str] = "resumed"
    step: int


@dataclass(frozen=True, slots=True)
class JobEnded(JobEvent):
    """The job has ended: one of the next three."""

    state: ClassVar[JobState]
    step: int


@dataclass(frozen=True, slots=True)
class JobCancelled(JobEnded):
    kind: ClassVar[str] = "cancelled"
    state: ClassVar[JobState] = JobState.CANCELLED


@dataclass(frozen=True, slots=True)
class JobFailed(JobEnded):
    """The job cannot continue; its neighbours do."""

    kind: ClassVar[str] = "failed"
    state: ClassVar[JobState] = JobState.FAILED
    reason: Reason


@dataclass(frozen=True, slots=True)
class JobSucceeded(JobEnded):
    kind: ClassVar[str] = "succeeded"
    state: ClassVar[JobState] = JobState.SUCCEEDED
    adapter_dir: str | None
    early_stopped: bool = False


@dataclass(frozen=True, slots=True)
class JobWarning(Event):
    """Something worth knowing that stops nothing."""

    kind: ClassVar[str] = "warning"
    jobs: tuple[str, ...]
    """Jobs it concerns; empty if it concerns the whole run."""
    message: str


def predicted_from(num_measured: int) -> str:
    return "predicted from " + (f"{num_measured:,} measured passes" if num_measured else "the hardware table")


@dataclass(frozen=True, slots=True)
class JobsGrouped(Event):
    """From here on other jobs share microbatches; no result depends on it."""

    kind: ClassVar[str] = "grouped"
    groups: tuple[tuple[str, ...], ...]
    fills: tuple[int, ...]
    gain: float | None
    """Predicted share of time that these groups save against one group, or one group against several; None without an
    alternative."""
    num_measured: int
    """Measured stage passes that the prediction rests on; 0: the hardware table."""
    num_replicas: int = 1

    @property
    def text(self) -> str:
        source = predicted_from(self.num_measured)
        each = "" if self.num_replicas == 1 else f" on each of {self.num_replicas} replicas in stages"
        if len(self.groups) == self.num_replicas:
            other = "" if self.gain is None else f"; several groups would take {self.gain:.1%} longer"
            jobs = f" of {counted(len(self.groups[0]), 'job')}" if self.num_replicas == 1 else each
            return f"one group{jobs} is best{other} ({source})"
        shown = ["; ".join(", ".join(group) for group in self.groups)] if len(self.groups) <= 4 else []
        fills = f"{min(self.fills):,} to {max(self.fills):,}" if len({*self.fills}) > 1 else f"{self.fills[0]:,}"
        named = "".join(f": {names}" for names in shown)
        return (
            f"{len(self.groups)} groups of jobs{named}; microbatches of up to {fills} tokens, {self.gain or 0.0:.1%} "
            f"faster than one group{each} ({source})"
        )


@dataclass(frozen=True, slots=True)
class MicrobatchesPaired(Event):
    """From here on microbatches run side by side on devices that share every layer, or not; no result depends on it."""

    kind: ClassVar[str] = "paired"
    num_pairs: int
    gain: float | None
    """Predicted share of time that pairs save; None: no two microbatches can be a pair."""
    groups: tuple[tuple[str, ...], ...]
    num_measured: int
    """Measured passes that the prediction rests on; 0: the hardware table."""

    @property
    def text(self) -> str:
        if self.gain is None:
            return "every microbatch runs alone, as no two without a common job have room side by side"
        source = predicted_from(self.num_measured)
        if not self.num_pairs:
            why = f"would save {self.gain:.1%}" if self.gain > 0 else f"would take {-self.gain:.1%} longer"
            return f"every microbatch runs alone: pairs {why} ({source})"
        named = f" of {'; '.join(', '.join(group) for group in self.groups)}" if 1 < len(self.groups) <= 4 else ""
        gained = f"{self.gain:.1%} faster" if self.gain > 0 else f"{-self.gain:.1%} slower, too little to change"
        return (
            f"microbatches{named} run two at a time, one computes while the other's sums are added up: {gained} "
            f"({source})"
        )


@dataclass(frozen=True, slots=True)
class LayoutDecided(Event):
    """Jobs have come or gone, and the layout was changed or kept; no result depends on it."""

    kind: ClassVar[str] = "layout"
    layout: str
    before: str
    reason: str
    """Reason for the decision, in words that follow a colon."""
    seconds: float = 0.0

    @property
    def has_moved(self) -> bool:
        return self.layout != self.before

    @property
    def text(self) -> str:
        if not self.has_moved:
            return f"{self.layout} is kept: {self.reason}"
        return f"{self.layout} instead of {self.before}: {self.reason} (it took {self.seconds:,.1f} s)"


@dataclass(frozen=True, slots=True)
class MicrobatchDone(Event):
    kind: ClassVar[str] = "microbatch"
    jobs: tuple[str, ...]
    tokens: int
    rows: int
    seconds: float
    num_reference_rows: int = 0
    """Number of those rows that belong to reference passes."""


@dataclass(frozen=True, slots=True)
class EvalSliceDone(Event):
    """A part of a long evaluation ran; other jobs, commands and prompts have their turn before the next part."""

    kind: ClassVar[str] = "eval_slice"
    jobs: tuple[str, ...]
    tokens: int
    seconds: float


class EventQueue:
    """Events in order; stages take several steps of a job before the first is yielded."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, events: Iterable[Event]) -> None:
        self._events.extend(events)

    def next(self) -> Event:
        return self._events.popleft()

    def has_step(self, job: str) -> bool:
        return any(isinstance(event, StepDone) and event.job == job for event in self._events)
