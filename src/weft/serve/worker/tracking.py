"""Metrics of jobs that asked for it, sent on to Weights & Biases in a thread of its own: nobody ever waits for it.

Each job has a run of its own, known by the job's id, so that the next worker goes on with it. What a tenant's job
tells is its own metrics; the worker's output, its machine and its code stay here. An account that does not answer
costs a warning in the job's events and nothing else.
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
from weft.serve.worker.held import Held

MAX_WAITING = 10_000
"""Metrics that may wait; while there are more, new ones are dropped."""
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
"""What wandb must not send of a process that works for several tenants."""


class Tracking:
    """The trackers of one worker's jobs."""

    def __init__(self, directory: Path, warn: Callable[[str, str], None]) -> None:
        """wandb keeps its files in `directory`; `warn` gets the name of a claim and a sentence, in our thread."""
        self._directory = directory
        self._warn = warn
        self._queue: queue.Queue[tuple[Held, Event | None] | None] = queue.Queue(MAX_WAITING)
        self._open: dict[str, Trackers] = {}
        self._thread: threading.Thread | None = None

    def tell(self, held: Held, event: Event | None) -> None:
        """Passes an event on if the job asked for it; None: the worker has done with the job."""
        is_told = event is None or isinstance(event, StepDone | EvalDone | JobEnded)
        if not held.job["integrations"] or not is_told:
            return
        if self._thread is None:
            # A daemon: a process that must go does not wait for another company's server.
            self._thread = threading.Thread(target=self._run, name="weft-tracking", daemon=True)
            self._thread.start()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((held, event))

    def close(self, timeout_s: float) -> None:
        """Sends what is waiting and ends all runs, for as long as that may take."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            told = self._queue.get()
            if told is None:
                break
            self._pass_on(*told)
        for tracker in self._open.values():
            tracker.close()

    def _pass_on(self, held: Held, event: Event | None) -> None:
        if event is None or isinstance(event, JobEnded):
            trackers = self._open.pop(held.name, None)
            if trackers is not None and event is None:
                trackers.finish(held.id, JobState.PAUSED)
            elif trackers is not None and event is not None:
                trackers.hear(event, held.id)
            return
        if held.name not in self._open:
            self._open[held.name] = self._start(held)
        self._open[held.name].hear(event, held.id)

    def _start(self, held: Held) -> Trackers:
        opened: dict[str, Tracker] = {}
        for integration in held.job["integrations"]:
            project = integration["wandb"]["project"]
            try:
                opened[f"wandb ({project})"] = WandbTracker(
                    self._directory, held.tenant, **run_options(held, integration)
                )
            except ImportError:
                self._warn(held.name, "wandb is not installed where this job trains; it gets no metrics")
        return Trackers(opened, lambda message: self._warn(held.name, message))


def run_options(held: Held, integration: Mapping[str, Any]) -> dict[str, Any]:
    """What wandb is told of a job's run."""
    wanted = integration["wandb"]
    options = {name: wanted[name] for name in ("project", "entity", "tags") if wanted.get(name)}
    name = wanted.get("name") or held.job["suffix"] or held.id
    return {**options, "name": name, "id": held.id, "resume": "allow", "settings": dict(PRIVATE)}
