"""What a run asks of whatever trains it: an engine in this process, or one over many replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from weft.data.chat.chat_template import Tokenizer
from weft.data.dataset import JobData
from weft.engine.events import Event
from weft.engine.execute.protocol import ReplicaFacts
from weft.engine.timeline import TimelineRecorder
from weft.job_state import JobState, Reason
from weft.spec import JobSpec
from weft.store.run_dir import RunDirectory


class RunJob(Protocol):
    """What is known of a job of a run."""

    @property
    def spec(self) -> JobSpec:
        """What was asked for."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What its owner should know before it starts."""
        ...

    @property
    def state(self) -> JobState:
        """Where it stands."""
        ...

    @property
    def reason(self) -> Reason | None:
        """Why it stands there."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole job."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens trained."""
        ...


class ReplicaSide(Protocol):
    """The replica, or what all replicas have in common."""

    @property
    def facts(self) -> ReplicaFacts:
        """What does not change about it."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the base model."""
        ...


class RunEngine(Protocol):
    """Trains the jobs of a run."""

    @property
    def jobs(self) -> Mapping[str, RunJob]:
        """By name."""
        ...

    @property
    def executor(self) -> ReplicaSide:
        """Where they are executed."""
        ...

    @property
    def layout(self) -> str:
        """How it lies over devices, as `--layout` says it."""
        ...

    @property
    def timeline(self) -> TimelineRecorder:
        """What ran when, and where the time went."""
        ...

    def submit(self, spec: JobSpec, data: JobData, *, base_dir: Path | str = ".") -> None:
        """Adds a job, or raises what is wrong with it."""
        ...

    def keep_in(self, directory: RunDirectory) -> None:
        """Writes there, and goes on from what is there."""
        ...

    def events(self) -> Iterator[Event]:
        """Trains, and yields what happens."""
        ...

    def stop(self) -> None:
        """Pauses and saves every job."""
        ...

    def finish_files(self) -> None:
        """Waits for all that is being written."""
        ...

    def close(self) -> None:
        """Ends what else belongs to it, such as other processes."""
        ...
