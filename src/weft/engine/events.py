"""Events: the engine tells in order, as plain values, what happens while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from weft.job_state import JobState, Reason, ReasonCode
from weft.wording import counted


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in an engine."""

    kind: ClassVar[str] = "event"

    def fields(self) -> dict[str, Any]:
        """The event's values by name, further metrics among them."""
        values = dataclasses.asdict(self)
        return {**values, **values.pop("metrics", {})}


@dataclass(frozen=True, slots=True)
class JobEvent(Event):
    """Something that happened to one job."""

    job: str


@dataclass(frozen=True, slots=True)
class JobStarted(JobEvent):
    """The job has a slot and will be trained."""

    kind: ClassVar[str] = "job_started"
    step: int
    """Steps it has already done; above 0 after a resume."""
    num_steps: int


@dataclass(frozen=True, slots=True)
class JobWaiting(JobEvent):
    """There is no room for the job yet; it starts, or goes on, as soon as there is."""

    kind: ClassVar[str] = "waiting"
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class JobPreempted(JobEvent):
    """Another job needs the room first; this one waits at its last step and goes on by itself."""

    kind: ClassVar[str] = "preempted"
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class StepDone(JobEvent):
    """One optimizer step of one job."""

    kind: ClassVar[str] = "step"
    step: int
    num_steps: int
    epoch: float
    loss: float
    """Mean over the supervised tokens of the global batch."""
    mean_token_accuracy: float
    """The share of those tokens that the model would have chosen too: none had a larger logit."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Tokens of the global batch."""
    num_tokens: int
    """Tokens of the job so far."""
    seconds: float
    """Since the run started."""
    skipped: bool = False
    """The loss or the gradient was not finite, so the weights stayed as they were."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the job's objective measures, by name."""


@dataclass(frozen=True, slots=True)
class EvalDone(JobEvent):
    """One evaluation of one job."""

    kind: ClassVar[str] = "eval"
    step: int
    epoch: float
    eval_loss: float
    eval_mean_token_accuracy: float
    eval_runtime: float
    is_best: bool
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the job's objective measures, by names that begin with eval_."""


COMMON_VALUES = frozenset(
    {field.name for kind in (StepDone, EvalDone) for field in dataclasses.fields(kind)} | {"time"}
)
"""What every step and evaluation has; `time` is what metrics.jsonl calls `seconds`."""


def own_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """What only the job's objective measures, out of the values of an event or of a line of metrics.jsonl."""
    return {name: value for name, value in values.items() if name not in COMMON_VALUES}


@dataclass(frozen=True, slots=True)
class CheckpointSaved(JobEvent):
    """A checkpoint is on disk."""

    kind: ClassVar[str] = "checkpoint"
    step: int


@dataclass(frozen=True, slots=True)
class JobPaused(JobEvent):
    """The job keeps its state and trains no further until resumed."""

    kind: ClassVar[str] = "paused"
    step: int
    reason: Reason | None = None

    @property
    def is_asked_for(self) -> bool:
        """Somebody paused the job or stopped the run; otherwise something stands in the job's way."""
        return self.reason is None or self.reason.code is ReasonCode.RUN_STOPPED


@dataclass(frozen=True, slots=True)
class JobResumed(JobEvent):
    """The job trains again."""

    kind: ClassVar[str] = "resumed"
    step: int


@dataclass(frozen=True, slots=True)
class JobEnded(JobEvent):
    """Nothing more will happen to the job; it is one of the three that follow."""

    state: ClassVar[JobState]
    """How it ended."""
    step: int


@dataclass(frozen=True, slots=True)
class JobCancelled(JobEnded):
    """The job was taken off; its slot is free."""

    kind: ClassVar[str] = "cancelled"
    state: ClassVar[JobState] = JobState.CANCELLED


@dataclass(frozen=True, slots=True)
class JobFailed(JobEnded):
    """The job cannot go on; its neighbours do."""

    kind: ClassVar[str] = "failed"
    state: ClassVar[JobState] = JobState.FAILED
    reason: Reason


@dataclass(frozen=True, slots=True)
class JobSucceeded(JobEnded):
    """The job is done and its adapter is written."""

    kind: ClassVar[str] = "succeeded"
    state: ClassVar[JobState] = JobState.SUCCEEDED
    adapter_dir: str | None
    early_stopped: bool = False


@dataclass(frozen=True, slots=True)
class JobWarning(Event):
    """Something worth knowing that stops nothing."""

    kind: ClassVar[str] = "warning"
    jobs: tuple[str, ...]
    """The jobs it concerns; none if it concerns the run as a whole."""
    message: str


@dataclass(frozen=True, slots=True)
class JobsGrouped(Event):
    """From here on, other jobs share microbatches than before; no result depends on it."""

    kind: ClassVar[str] = "grouped"
    groups: tuple[tuple[str, ...], ...]
    fills: tuple[int, ...]
    """Tokens that a microbatch of each group is filled up to."""
    gain: float | None
    """Predicted: the part of the time that these groups save against all jobs in one, or, of one group, what it saves
    against the best of several; None if there were none to compare."""
    num_measured: int
    """Passes of a stage that the prediction rests on; 0: on the hardware table."""
    num_replicas: int = 1
    """In stages, each of which has groups of its own."""

    @property
    def text(self) -> str:
        """In one line."""
        source = f"from {self.num_measured:,} measured passes" if self.num_measured else "from the hardware table"
        each = "" if self.num_replicas == 1 else f" on each of {self.num_replicas} replicas in stages"
        if len(self.groups) == self.num_replicas:
            other = "" if self.gain is None else f"; several groups would take {self.gain:.1%} longer"
            jobs = f" of {counted(len(self.groups[0]), 'job')}" if self.num_replicas == 1 else each
            return f"one group{jobs} is best{other} (predicted {source})"
        shown = ["; ".join(", ".join(group) for group in self.groups)] if len(self.groups) <= 4 else []
        fills = f"{min(self.fills):,} to {max(self.fills):,}" if len({*self.fills}) > 1 else f"{self.fills[0]:,}"
        told = "".join(f": {names}" for names in shown)
        return (
            f"{len(self.groups)} groups of jobs{told}; microbatches of up to {fills} tokens, {self.gain or 0.0:.1%} "
            f"faster than one group{each} (predicted {source})"
        )


@dataclass(frozen=True, slots=True)
class MicrobatchesPaired(Event):
    """From here on, microbatches run side by side on devices that share every layer, or do not; no result depends on
    it."""

    kind: ClassVar[str] = "paired"
    num_pairs: int
    """Of a program; 0: every microbatch runs alone."""
    gain: float | None
    """Predicted: the part of the time that pairs save, or would; None: no two microbatches can be a
    pair."""
    groups: tuple[tuple[str, ...], ...]
    """Jobs that share microbatches."""
    num_measured: int
    """Passes that the prediction rests on; 0: on the hardware table."""

    @property
    def text(self) -> str:
        """In one line."""
        if self.gain is None:
            return "every microbatch runs alone, as no two without a common job have room side by side"
        source = "the hardware table; links are assumed"
        if self.num_measured:
            source = f"{self.num_measured:,} measured passes"
        if not self.num_pairs:
            why = f"would save {self.gain:.1%}" if self.gain > 0 else f"would take {-self.gain:.1%} longer"
            return f"every microbatch runs alone: pairs {why} (predicted from {source})"
        told = f" of {'; '.join(', '.join(group) for group in self.groups)}" if 1 < len(self.groups) <= 4 else ""
        return (
            f"microbatches{told} run two at a time, one computes while the other's sums are added up: {self.gain:.1%} "
            f"faster (predicted from {source})"
        )


@dataclass(frozen=True, slots=True)
class LayoutDecided(Event):
    """Jobs have come or gone, and the layout of the run was changed or kept; no result depends on it."""

    kind: ClassVar[str] = "layout"
    layout: str
    """From here on."""
    before: str
    reason: str
    """Why, as the rest of a line."""
    seconds: float = 0.0
    """That training stood still for the move."""

    @property
    def has_moved(self) -> bool:
        """Whether it was changed."""
        return self.layout != self.before

    @property
    def text(self) -> str:
        """In one line."""
        if not self.has_moved:
            return f"{self.layout} is kept: {self.reason}"
        return f"{self.layout} instead of {self.before}: {self.reason} (it took {self.seconds:,.1f} s)"


@dataclass(frozen=True, slots=True)
class MicrobatchDone(Event):
    """One microbatch went through the backbone."""

    kind: ClassVar[str] = "microbatch"
    jobs: tuple[str, ...]
    """All jobs with samples in it."""
    tokens: int
    rows: int
    """Rows computed, padding included."""
    seconds: float
    """Duration."""
    heard: int = 0
    """Of the rows, those that went through references, forward only."""
