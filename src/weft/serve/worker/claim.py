"""One job that a worker has claimed: what the worker knows about it, what the engine reported, and its trackers.

The metrics of jobs that want it go to Weights & Biases, in a thread of its own that the worker does not wait for.
Each job has a run of its own, known by the job's id, so that the next worker continues it. Only the job's metrics are
sent; the worker's output, its machine and its code stay here. An account that does not answer costs a warning in the
job's events and nothing else.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.engine.events import EvalDone, Event, JobEnded, StepDone
from weft.job_state import JobState
from weft.report.trackers import Tracker, Trackers, WandbTracker
from weft.serve.db.engine import DbRow

GIVE_BACK = "give back"
"""What the engine is to do with a job that other workers are to have."""


@dataclass(frozen=True)
class EngineNotice:
    """One event of the engine, and what was true when it happened."""

    event: Event
    tokens: int = 0
    """Tokens the job had trained by then, as the engine counts them."""
    evaluated: int = 0
    """Tokens of its evaluation data, where the event is an evaluation."""
    export: Path | None = None
    """The directory to which the adapter was exported at that moment."""
    error: dict[str, Any] | None = None
    """The error object for the user, where more is known than the event's reason."""


@dataclass(frozen=True)
class StoredResult:
    """The files of a finished job: they are in the file store, but no row names them yet."""

    adapter: str
    adapter_bytes: int
    table: str
    table_bytes: int
    table_sha256: str


@dataclass(eq=False)
class Claim:
    """A job as this worker claimed it, and what the worker has done with it since."""

    job: DbRow
    is_training: bool = False
    """The engine has the job. Before that, its data is being prepared."""
    is_put_back: bool = False
    """The job goes back to the queue because this worker cannot prepare it now."""
    too_large: dict[str, Any] | None = None
    """The error object of a job that does not fit into this worker's memory; another worker may have more."""
    is_leaving: bool = False
    """The job is saved, trains no more here, and goes back to the queue once its checkpoint is in the file store."""
    leave_by: float = 0.0
    """Latest time, by the monotonic clock, at which the job goes back to the queue."""
    leave_message: str | None = None
    """Message to the user when the job goes back to the queue; None: the default, that the worker stops."""
    requested: str | None = None
    """What the engine is to do: cancel or pause for the user, or give back."""
    priority: int = 0
    retry_at: float | None = None
    """When a job that could not write is tried again, by the monotonic clock."""
    has_stalled: bool = False
    """The job could not write to its directory before; its user knows."""
    notices: deque[EngineNotice] = field(default_factory=deque)
    """Notices that are not in the database yet, oldest first."""
    blobs: dict[int, str] = field(default_factory=dict)
    """Archives of checkpoints that are in the file store but not yet in a row, by step."""
    is_unstored: bool = False
    result: StoredResult | None = None
    first_step: tuple[int, float] | None = None
    """The first step this worker saw and its time; the estimate of the end starts there."""
    metrics: dict[str, Any] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of the steps before the adopted checkpoint; a worker that died may not have reported all of them."""

    @property
    def id(self) -> str:
        return str(self.job["id"])

    @property
    def tenant(self) -> str:
        return str(self.job["tenant"])

    @property
    def fence(self) -> int:
        """The number that proves that the job is still ours."""
        return int(self.job["fence"])

    @property
    def name(self) -> str:
        """What the engine and the directory call the claim; it is unique even among claims of the same job."""
        return f"{self.id}.{self.fence}"


MAX_WAITING = 10_000
"""How many events may wait to be sent; while there are more, new ones are dropped."""
PRIVATE: Mapping[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "host": "weft",
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Settings that keep wandb from sending anything about a process that works for several tenants."""


class Tracking:
    def __init__(self, directory: Path, warn: Callable[[str, str], None]) -> None:
        """wandb keeps its files in `directory`; `warn` is called, in this thread, with a claim's name and a text."""
        self._directory = directory
        self._warn = warn
        self._queue: queue.Queue[tuple[Claim, Event | None] | None] = queue.Queue(MAX_WAITING)
        self._open: dict[str, Trackers] = {}
        self._thread: threading.Thread | None = None

    def record(self, claim: Claim, event: Event | None) -> None:
        """Passes an event on if the job has integrations; None means that the job has left this worker."""
        is_sent = event is None or isinstance(event, StepDone | EvalDone | JobEnded)
        if not claim.job["integrations"] or not is_sent:
            return
        if self._thread is None:
            # A daemon thread: a process that must end does not wait for another company's server.
            self._thread = threading.Thread(target=self._run, name="weft-tracking", daemon=True)
            self._thread.start()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((claim, event))

    def close(self, timeout_s: float) -> None:
        """Sends what is waiting and ends all runs, but waits no longer than `timeout_s`."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                break
            self._pass_on(*item)
        for tracker in self._open.values():
            tracker.close()

    def _pass_on(self, claim: Claim, event: Event | None) -> None:
        if event is None or isinstance(event, JobEnded):
            trackers = self._open.pop(claim.name, None)
            if trackers is not None and event is None:
                trackers.finish(claim.id, JobState.PAUSED)
            elif trackers is not None and event is not None:
                trackers.record(event, claim.id)
            return
        if claim.name not in self._open:
            self._open[claim.name] = self._start(claim)
        self._open[claim.name].record(event, claim.id)

    def _start(self, claim: Claim) -> Trackers:
        opened: dict[str, Tracker] = {}
        for integration in claim.job["integrations"]:
            project = integration["wandb"]["project"]
            try:
                opened[f"wandb ({project})"] = WandbTracker(
                    self._directory, claim.tenant, **run_options(claim, integration)
                )
            except ImportError:
                self._warn(claim.name, "wandb is not installed where this job trains; it gets no metrics")
        return Trackers(opened, lambda message: self._warn(claim.name, message))


def run_options(claim: Claim, integration: Mapping[str, Any]) -> dict[str, Any]:
    wanted = integration["wandb"]
    options = {name: wanted[name] for name in ("project", "entity", "tags") if wanted.get(name)}
    name = wanted.get("name") or claim.job["suffix"] or claim.id
    return {**options, "name": name, "id": claim.id, "resume": "allow", "settings": dict(PRIVATE)}
