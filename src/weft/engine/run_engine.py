"""The interface between a run and the engine that trains it: an engine in this process, or one over many replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from weft.data.chat_template import Tokenizer
from weft.data.dataset import JobData
from weft.engine.events import Event
from weft.engine.execute.protocol import ReplicaFacts
from weft.engine.timeline import TimelineRecorder
from weft.job_state import JobState, Reason
from weft.spec import JobSpec
from weft.store.run_dir import RunDirectory


class RunJob(Protocol):
    @property
    def spec(self) -> JobSpec: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def inputs(self) -> Mapping[str, Any]:
        """See `JobProgress.inputs`."""
        ...

    @property
    def state(self) -> JobState: ...

    @property
    def reason(self) -> Reason | None: ...

    @property
    def step(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


class ReplicaSide(Protocol):
    @property
    def facts(self) -> ReplicaFacts: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class RunEngine(Protocol):
    @property
    def jobs(self) -> Mapping[str, RunJob]: ...

    @property
    def executor(self) -> ReplicaSide: ...

    @property
    def layout(self) -> str:
        """Layout in the form of `--layout`."""
        ...

    @property
    def timeline(self) -> TimelineRecorder: ...

    def submit(self, spec: JobSpec, data: JobData, *, base_dir: Path | str = ".") -> None: ...

    def keep_in(self, directory: RunDirectory) -> None:
        """Writes to this run directory, and continues from what it holds."""
        ...

    def events(self) -> Iterator[Event]: ...

    def stop(self) -> None: ...

    def finish_files(self) -> None: ...

    def close(self) -> None: ...
