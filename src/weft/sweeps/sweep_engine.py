"""What a sweep asks of whatever trains its trials: an engine in this process, or one over many replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from weft.data.dataset import JobData
from weft.data.prompts import Prompt
from weft.engine.inference.answers import Answer
from weft.engine.inference.generate import Decoding
from weft.engine.run_engine import ReplicaSide, RunEngine, RunJob
from weft.objectives.metrics import MeanScores
from weft.spec import AdapterSpec
from weft.wall_clock import TimeSplit


class SweepJob(RunJob, Protocol):
    """What is known of the job of a trial."""

    @property
    def data(self) -> JobData:
        """What it is trained and evaluated on."""
        ...

    @property
    def may_end(self) -> bool:
        """What its last step leaves to do is not all done, and may end it."""
        ...

    @property
    def has_best(self) -> bool:
        """The weights of its best evaluation are kept."""
        ...


class CheckingSide(ReplicaSide, Protocol):
    """A replica, or what all replicas have in common, that knows which adapters fit."""

    def check_adapter(self, adapter: AdapterSpec) -> None:
        """ConfigError for an adapter that the backbone cannot have."""
        ...


class SweepEngine(RunEngine, Protocol):
    """Trains the trials of a sweep; what is asked of a job is of its weights as they are at that moment."""

    @property
    def jobs(self) -> Mapping[str, SweepJob]:
        """By name."""
        ...

    @property
    def executor(self) -> CheckingSide:
        """Where they are executed."""
        ...

    @property
    def num_replicas(self) -> int:
        """Replicas of the backbone that trials are trained on."""
        ...

    @property
    def time_split(self) -> TimeSplit:
        """Where the wall clock of the sweep went so far, over all its sessions."""
        ...

    def hold(self, name: str, step: int) -> None:
        """Lets a job take no step beyond this one for now."""
        ...

    def hold_steps(self, name: str) -> None:
        """Lets a job take no further step; `jobs` knows where it stands then."""
        ...

    def pause(self, name: str) -> None:
        """Lets a job wait without a place."""
        ...

    def resume(self, name: str) -> None:
        """Lets a paused job go on."""
        ...

    def cancel(self, name: str) -> None:
        """Takes a job off for good."""
        ...

    def forget(self, name: str) -> None:
        """Lets go of a job that has ended."""
        ...

    def evaluate(self, name: str) -> MeanScores:
        """How a job does on its evaluation data."""
        ...

    def answer(self, name: str, prompts: Sequence[Prompt], decoding: Decoding) -> list[Answer]:
        """What a job answers to prompts."""
        ...

    def export_adapter(self, name: str, directory: Path | str) -> None:
        """Writes a job's adapter as a PEFT directory."""
        ...
