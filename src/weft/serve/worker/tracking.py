"""Sends the metrics of jobs that ask for it to Weights & Biases, in a thread of its own that nobody waits for.

Each job has a run of its own, known by the job's id, so that the next worker continues it. Only the job's metrics are
sent; the worker's output, its machine and its code stay here. An account that does not answer costs a warning in the
job's events and nothing else.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.engine.events import EvalDone, Event, JobEnded, StepDone
from weft.job_state import JobState
from weft.report.trackers import Tracker, Trackers, WandbTracker
from weft.serve.worker.claim import Claim

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
    """The trackers of one worker's jobs."""

    def __init__(self, directory: Path, warn: Callable[[str, str], None]) -> None:
        """wandb keeps its files in `directory`; `warn` is called, in this thread, with a claim's name and a text."""
        self._directory = directory
        self._warn = warn
        self._queue: queue.Queue[tuple[Claim, Event | None] | None] = queue.Queue(MAX_WAITING)
        self._open: dict[str, Trackers] = {}
        self._thread: threading.Thread | None = None

    def tell(self, claim: Claim, event: Event | None) -> None:
        """Passes an event on if the job asked for it; None means that the job has left this worker."""
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
    """Returns the options of the wandb run of a job."""
    wanted = integration["wandb"]
    options = {name: wanted[name] for name in ("project", "entity", "tags") if wanted.get(name)}
    name = wanted.get("name") or claim.job["suffix"] or claim.id
    return {**options, "name": name, "id": claim.id, "resume": "allow", "settings": dict(PRIVATE)}
