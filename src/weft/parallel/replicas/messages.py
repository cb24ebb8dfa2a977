"""Messages between a controller and its ranks: plain values that cross a connection.

A rank is a process with one replica of the backbone and an engine on it. It plans and executes by itself; only its jobs
and their events cross the connection, so no step waits for the controller. This module does not import torch, so that
ranks can be started first and import it meanwhile.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine.events import Event
from weft.errors import ConfigError, StorageError
from weft.job_state import Reason
from weft.plan.admit import Budget
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.spec.run import Capacity
from weft.store.owner import Owner

if TYPE_CHECKING:
    from weft.data.load import Prompt
    from weft.engine.engine import Engine
    from weft.engine.execute.protocol import ReplicaFacts
    from weft.parallel.stages.load_stages import StageLayout
    from weft.spec.sampling import Decoding

ALIVE_S = 1.0
"""Seconds from one sign of life of a rank to the next."""
SEND_S = 0.05
"""Longest delay of steps and microbatches, which are reported together."""


@dataclass(frozen=True)
class RankOrder:
    backbone: BackboneSpec
    capacity: Capacity
    longest: int
    """Tokens of the longest sample that any job may have, on any rank."""
    planner: str
    adapters: tuple[AdapterSpec, ...]
    have_any_order: bool = False
    max_jobs: int | None = None
    memory_limit: float | str | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    layouts: Sequence[StageLayout | None] = ()
    """Layout of each rank's replica, by rank; None, or an empty entry, is one device."""
    is_controlled: bool = False
    """True: after an evaluation the rank waits for `ContinueJob`, since the controller may stop the job."""


@dataclass(frozen=True)
class Command:
    """Request to a rank."""


@dataclass(frozen=True)
class SetUp(Command):
    index: int
    order: RankOrder


@dataclass(frozen=True)
class BeStage(Command):
    """Makes the process a stage of a layout instead of a rank: `stage_process.main` reads all further messages."""


@dataclass(frozen=True)
class RefuseRank(Command):
    error: ConfigError


@dataclass(frozen=True)
class OpenDirectory(Command):
    """Keeps jobs in this run directory, which the controller owns; answered by `DirectoryOpened`."""

    path: Path
    owner: Owner
    permit: Path
    """File that permits the rank to write there, as long as it exists."""


@dataclass(frozen=True)
class JobOrder:
    spec: JobSpec
    base_dir: Path
    clock: datetime.datetime | None = None


@dataclass(frozen=True)
class CheckJob(Command):
    order: JobOrder


@dataclass(frozen=True)
class TrainJob(Command):
    """Trains a job, from its last checkpoint if any."""

    order: JobOrder
    hold_step: int | None = None


@dataclass(frozen=True)
class ReleaseJob(Command):
    """Saves a job at its next step boundary and drops it: `JobReleased`, unless it ends or is paused first."""

    job: str


@dataclass(frozen=True)
class CancelJob(Command):
    job: str


@dataclass(frozen=True)
class HoldJob(Command):
    job: str
    step: int


@dataclass(frozen=True)
class ForgetJob(Command):
    job: str


@dataclass(frozen=True)
class JobQuery(Command):
    """Query about a job, answered by `QueryResult` once the job has reached `step` here, unless it leaves this rank
    before."""

    job: str
    question: Question
    step: int
    is_ended: bool = False
    """True if the job has ended: the query is answered once the job has ended on this rank, too, after a restore."""


@dataclass(frozen=True)
class CheckAdapter(Command):
    """Checks whether the adapter fits the backbone; answered by `AdapterChecked`."""

    adapter: AdapterSpec


@dataclass(frozen=True)
class ContinueJob(Command):
    """The controller has processed the evaluation of a job after a step; a rank that waits for this continues."""

    job: str
    step: int


@dataclass(frozen=True)
class StopJobs(Command):
    """Saves and pauses all jobs."""


@dataclass(frozen=True)
class EndRank(Command):
    """Ends the rank."""


@dataclass(frozen=True)
class Report:
    """Message from a rank."""


@dataclass(frozen=True)
class RankJoined(Report):
    host: str
    pid: int
    versions: Mapping[str, str]
    gpu: str = ""
    """Name of the first GPU that the rank sees; empty if there is none."""


@dataclass(frozen=True)
class RankReady(Report):
    facts: ReplicaFacts
    capacity: int
    budget: Budget
    weights: str | None
    """Digest of some of the frozen weights; None where no process of the rank has all of them."""
    speed: float = 1.0
    """Predicted tokens per second, to compare ranks whose replicas have different layouts; 1 if all have the same."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DirectoryOpened(Report):
    error: StorageError | None = None


@dataclass(frozen=True)
class RankAlive(Report):
    """Sign of life."""


@dataclass(frozen=True)
class RankFailed(Report):
    error: Exception


@dataclass(frozen=True)
class JobChecked(Report):
    job: str
    num_parameters: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    """Bytes of the job on a device, with optimizer and reference."""
    notes: tuple[str, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class JobReleased(Report):
    job: str
    step: int


@dataclass(frozen=True)
class JobRefused(Report):
    """The job cannot be trained after all, although its check passed."""

    job: str
    reason: Reason


@dataclass(frozen=True)
class QueryResult(Report):
    job: str
    step: int
    num_tokens: int
    answer: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class AdapterChecked(Report):
    error: Exception | None = None


@dataclass(frozen=True)
class JobView:
    step: int
    num_tokens: int
    may_end: bool
    has_best: bool


@dataclass(frozen=True)
class RankEvent:
    """An event, with its job's state at that time; None without a job, or if the controller made the event."""

    event: Event
    view: JobView | None = None


@dataclass(frozen=True)
class EventBatch(Report):
    events: tuple[RankEvent, ...]


@dataclass(frozen=True)
class RankIdle(Report):
    """No job here can continue, and all files are written."""

    num_applied: int
    """Number of commands applied so far; if the controller has sent more, the rank is not idle."""


@dataclass(frozen=True)
class Question:
    """A question about a job; the base class only returns its progress."""


@dataclass(frozen=True)
class ScoreQuery(Question):
    """Question for a job's scores on its evaluation data."""


@dataclass(frozen=True)
class AnswerQuery(Question):
    prompts: Sequence[Prompt]
    decoding: Decoding


@dataclass(frozen=True)
class AdapterQuery(Question):
    directory: Path


def answer_to(question: Question, engine: Engine, job: str) -> Any:
    match question:
        case ScoreQuery():
            return engine.evaluate(job)
        case AnswerQuery(prompts, decoding):
            return engine.answer(job, prompts, decoding)
        case AdapterQuery(directory):
            engine.export_adapter(job, directory)
    return None
