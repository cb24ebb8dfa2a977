"""What a controller tells its ranks, and what they tell it: plain values that cross a connection.

A rank is a process with one replica of the backbone and an engine on it. It plans and executes by itself; what crosses
the connection is which jobs it has and what happened to them. So nothing in a step waits for the controller. Importing
this brings no torch, so that ranks can be started first and import theirs meanwhile.
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
from weft.parallel.replicas.questions import Question
from weft.plan.admit import Budget
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.spec.run import Capacity
from weft.store.owner import Owner

if TYPE_CHECKING:
    from weft.engine.execute.protocol import ReplicaFacts
    from weft.parallel.stages.load_stages import StageLayout

ALIVE_S = 1.0
"""Seconds from one sign of life of a rank to the next."""
SEND_S = 0.05
"""Steps and microbatches are told together, at most so much late."""


@dataclass(frozen=True)
class RankOrder:
    """How ranks set up their replicas."""

    backbone: BackboneSpec
    capacity: Capacity
    longest: int
    """Tokens of the longest sample that any job may have, wherever it is placed."""
    planner: str
    adapters: tuple[AdapterSpec, ...]
    """Of the jobs to come."""
    have_any_order: bool = False
    """True if some of them have order-independent sums."""
    max_jobs: int | None = None
    """Most that train here at a time."""
    memory_limit: float | str | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    layouts: Sequence[StageLayout | None] = ()
    """How the replica of each rank is divided, by the rank's number; None, or none at all: it is on one device."""
    is_controlled: bool = False
    """Whoever hears of an evaluation may decide something before its job goes on: the rank stands still until then."""


@dataclass(frozen=True)
class Command:
    """Something that a rank is asked to do."""


@dataclass(frozen=True)
class SetUp(Command):
    """Which of the ranks a process is, and how it sets itself up; the first thing it is told."""

    index: int
    order: RankOrder


@dataclass(frozen=True)
class RefuseRank(Command):
    """The process cannot be a rank of this run; said instead of `SetUp`."""

    error: ConfigError


@dataclass(frozen=True)
class OpenDirectory(Command):
    """From now on jobs are kept in this run directory, which the controller owns; answered by `DirectoryOpened`."""

    path: Path
    owner: Owner
    permit: Path
    """The rank may write there as long as this file is there."""


@dataclass(frozen=True)
class JobOrder:
    """A job and where its data is."""

    spec: JobSpec
    base_dir: Path
    clock: datetime.datetime | None = None
    """What time it is for its chat templates."""


@dataclass(frozen=True)
class CheckJob(Command):
    """Says whether a job fits, without training it; answered by `JobChecked`."""

    order: JobOrder


@dataclass(frozen=True)
class TrainJob(Command):
    """Trains a job, from its last checkpoint if it has one."""

    order: JobOrder
    hold_step: int | None = None
    """It takes no step beyond this one for now."""


@dataclass(frozen=True)
class ReleaseJob(Command):
    """Saves a job at its next step boundary and lets go of it: `JobReleased`, unless it ends or is paused first."""

    job: str


@dataclass(frozen=True)
class CancelJob(Command):
    """Takes a job off for good."""

    job: str


@dataclass(frozen=True)
class HoldJob(Command):
    """Lets a job take no step beyond this one for now."""

    job: str
    step: int


@dataclass(frozen=True)
class ForgetJob(Command):
    """Lets go of a job that has ended; nobody asks about it any more."""

    job: str


@dataclass(frozen=True)
class JobQuery(Command):
    """Asks something of a job once it has come to a step here; answered by `QueryResult`, unless it leaves before."""

    job: str
    question: Question
    step: int
    is_ended: bool = False
    """It has ended, so it is asked after its end, wherever it comes to that once more."""


@dataclass(frozen=True)
class CheckAdapter(Command):
    """Says whether the backbone can have such an adapter; answered by `AdapterChecked`."""

    adapter: AdapterSpec


@dataclass(frozen=True)
class ContinueJob(Command):
    """The evaluation of a job after a step has been heard; a rank that stands still because of it goes on."""

    job: str
    step: int


@dataclass(frozen=True)
class StopJobs(Command):
    """Saves all jobs where they stand; they are paused then."""


@dataclass(frozen=True)
class EndRank(Command):
    """There is nothing more to do."""


@dataclass(frozen=True)
class Report:
    """Something that a rank tells."""


@dataclass(frozen=True)
class RankJoined(Report):
    """A process that would like to be a rank; the first thing it tells."""

    host: str
    pid: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class RankReady(Report):
    """The replica is loaded."""

    facts: ReplicaFacts
    capacity: int
    budget: Budget
    """What jobs may take here together."""
    weights: str | None
    """A digest of some of the frozen weights; None where no process of the rank has all of them."""
    speed: float = 1.0
    """Predicted tokens a second, where replicas are divided in different ways; compared with other ranks' alone."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DirectoryOpened(Report):
    """The rank writes into the run directory from now on, or cannot."""

    error: StorageError | None = None


@dataclass(frozen=True)
class RankAlive(Report):
    """Nothing has happened, but the process runs."""


@dataclass(frozen=True)
class RankFailed(Report):
    """The process ends because of this."""

    error: Exception


@dataclass(frozen=True)
class JobChecked(Report):
    """What is known of a job that was only checked."""

    job: str
    num_parameters: int = 0
    num_bytes: int = 0
    """That it takes on a device, with its optimizer and its reference."""
    notes: tuple[str, ...] = ()
    error: Exception | None = None
    """Why it cannot be trained."""


@dataclass(frozen=True)
class JobReleased(Report):
    """The job is saved and this rank has forgotten it."""

    job: str
    step: int


@dataclass(frozen=True)
class JobRefused(Report):
    """The job cannot be trained after all, although it could when it was checked."""

    job: str
    reason: Reason


@dataclass(frozen=True)
class QueryResult(Report):
    """What was asked of a job, where it stood then."""

    job: str
    step: int
    num_tokens: int
    answer: Any = None
    error: Exception | None = None
    """Why there is no answer."""


@dataclass(frozen=True)
class AdapterChecked(Report):
    """Whether the backbone can have an adapter."""

    error: Exception | None = None


@dataclass(frozen=True)
class JobView:
    """How a job stood when something was told of it."""

    step: int
    num_tokens: int
    may_end: bool
    """What its last step leaves to do is not all done, and may end it."""
    has_best: bool
    """The weights of its best evaluation are kept."""


@dataclass(frozen=True)
class RankEvent:
    """Something that happened, and how its job stood then; None if it has no job, or the controller says so itself."""

    event: Event
    view: JobView | None = None


@dataclass(frozen=True)
class EventBatch(Report):
    """What happened, in order."""

    events: tuple[RankEvent, ...]


@dataclass(frozen=True)
class RankIdle(Report):
    """No job here can go on, and all files are written."""

    num_applied: int
    """Commands it has obeyed so far: with more under way, it is not idle for long."""
