"""A rank inside a Ray actor: the actor's methods pass on the controller's commands and the rank's reports.

Nothing connects back to the controller, which may be anywhere that reaches the cluster. The actor's process imports
this module before torch, because the number of torch's threads must be set first.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.parallel.replicas.messages import Command, Report

POLL_S = 1.0
"""Most seconds that a request for reports waits for one."""
CONTROLLER_LOST_S = 60.0
"""Seconds without a request after which a rank ends: another process may continue the run."""
LOOK_S = 5.0
"""Seconds between two checks whether the controller is lost."""


@dataclass(frozen=True)
class ReportBatch:
    reports: tuple[Report, ...]
    ending: str | None = None


@dataclass(frozen=True)
class ActorHost:
    node_id: str
    address: str


class QueueConnection:
    """A rank's side of its connection: two unbounded queues of the same process."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def recv(self) -> object:
        return self.commands.get()

    def poll(self) -> bool:
        return not self.commands.empty()

    def send(self, report: Report) -> None:
        self.reports.put(report)


class RankActor:
    """Serves one rank in a thread; its methods may be called concurrently and in any order."""

    def __init__(self, variables: Mapping[str, str | None], folder: Path) -> None:
        """`variables`: those of the controller's environment, None if unset; `folder`: its working directory."""
        take_over(variables)
        with suppress(OSError):
            # If the node does not see it, relative file names fail with their own error.
            os.chdir(folder)
        self._connection = QueueConnection()
        self._ending: str | None = None
        self._polled_s = time.monotonic()
        self._early: dict[int, Command] = {}
        self._num_applied = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, name="weft-rank", daemon=True).start()
        threading.Thread(target=self._end_forsaken, name="weft-forsaken", daemon=True).start()

    def where(self) -> ActorHost:
        import ray

        return ActorHost(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def apply(self, number: int, command: Command) -> None:
        """Passes commands to the rank in the order of their numbers, which start at 0."""
        with self._lock:
            self._early[number] = command
            while self._num_applied in self._early:
                self._connection.commands.put(self._early.pop(self._num_applied))
                self._num_applied += 1

    def next_reports(self) -> ReportBatch:
        self._polled_s = time.monotonic()
        # Read first: all its reports are queued by then.
        ending = self._ending
        reports: list[Report] = []
        with suppress(queue.Empty):
            reports.append(self._connection.reports.get(timeout=0.0 if ending else POLL_S))
            while True:
                reports.append(self._connection.reports.get_nowait())
        return ReportBatch(tuple(reports), ending)

    def _serve(self) -> None:
        ending = "ended"
        try:
            from weft.parallel.replicas.rank import run_rank

            run_rank(self._connection)
        except BaseException as error:
            ending = f"ended with {type(error).__name__}: {error}"
        self._ending = ending

    def _end_forsaken(self) -> None:
        while time.monotonic() - self._polled_s < CONTROLLER_LOST_S:
            time.sleep(LOOK_S)
            if self._ending is not None:
                return
        # Threads may be writing; files appear whole or not at all.
        os._exit(1)


def take_over(variables: Mapping[str, str | None]) -> None:
    """Sets variables of this process's environment; None unsets one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
