"""What happens while the engine runs, as plain values in order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one job."""

    kind: ClassVar[str] = "event"
    job: str

    def fields(self) -> dict[str, Any]:
        """The event's values by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class JobStarted(Event):
    """The job has a slot and will be trained."""

    kind: ClassVar[str] = "job_started"
    step: int
    """Steps it has already done; above 0 after a resume."""
    num_steps: int


@dataclass(frozen=True, slots=True)
class JobWaiting(Event):
    """There is no room for the job yet; it starts, or goes on, as soon as there is."""

    kind: ClassVar[str] = "waiting"
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobPreempted(Event):
    """Another job needs the room first; this one waits at its last step and goes on by itself."""

    kind: ClassVar[str] = "preempted"
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepDone(Event):
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


@dataclass(frozen=True, slots=True)
class EvalDone(Event):
    """One evaluation of one job."""

    kind: ClassVar[str] = "eval"
    step: int
    epoch: float
    eval_loss: float
    eval_mean_token_accuracy: float
    eval_runtime: float
    is_best: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk."""

    kind: ClassVar[str] = "checkpoint"
    step: int


@dataclass(frozen=True, slots=True)
class JobPaused(Event):
    """The job keeps its state and trains no further until resumed."""

    kind: ClassVar[str] = "paused"
    step: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class JobResumed(Event):
    """The job trains again."""

    kind: ClassVar[str] = "resumed"
    step: int


@dataclass(frozen=True, slots=True)
class JobCancelled(Event):
    """The job was taken off; its slot is free."""

    kind: ClassVar[str] = "cancelled"
    step: int


@dataclass(frozen=True, slots=True)
class JobFailed(Event):
    """The job cannot go on; its neighbours do."""

    kind: ClassVar[str] = "failed"
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobSucceeded(Event):
    """The job is done and its adapter is written."""

    kind: ClassVar[str] = "succeeded"
    step: int
    adapter_dir: str | None
    early_stopped: bool = False


@dataclass(frozen=True, slots=True)
class JobWarning(Event):
    """Something worth knowing that stops nothing."""

    kind: ClassVar[str] = "warning"
    message: str


@dataclass(frozen=True, slots=True)
class MicrobatchDone(Event):
    """One microbatch went through the backbone; `job` names all jobs in it."""

    kind: ClassVar[str] = "microbatch"
    tokens: int
    rows: int
    """Rows computed, padding included."""
    seconds: float
    """Duration."""
