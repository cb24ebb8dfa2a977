"""A rank inside a Ray actor: the actor's methods carry what its controller says, and what the rank tells.

Nothing connects back to the controller, so that may be anywhere from where the cluster can be reached. This module is
imported in the actor's process before torch is, because how many threads torch takes is said there first.
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

HEAR_S = 1.0
"""Longest that a controller who asks for news waits for some."""
CONTROLLER_LOST_S = 60.0
"""A rank whose controller asks for nothing for so long ends: somebody else may go on with the run."""
LOOK_S = 5.0
"""Seconds between two looks at whether the controller still asks."""


@dataclass(frozen=True)
class Heard:
    """What a rank has told since its controller last asked."""

    reports: tuple[Report, ...]
    ending: str | None = None
    """How it ended, if it has, and these are its last words."""


@dataclass(frozen=True)
class ActorHost:
    """Where an actor runs."""

    node_id: str
    address: str


class QueueConnection:
    """A rank's side of its connection: two queues of the same process, and no limit to what they hold."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def recv(self) -> object:
        """The next thing that the controller said; waits for it."""
        return self.commands.get()

    def poll(self) -> bool:
        """Whether there is something that the controller said."""
        return not self.commands.empty()

    def send(self, report: Report) -> None:
        """Tells the controller something, when it asks."""
        self.reports.put(report)


class RankActor:
    """Serves one rank in a thread; its methods may be called at the same time and come in any order."""

    def __init__(self, variables: Mapping[str, str | None], folder: Path) -> None:
        """`variables`: of the controller's environment, None where it has none; `folder`: its working directory."""
        take_over(variables)
        with suppress(OSError):
            # Where the node does not see it, names of files that begin there are not found, which says so itself.
            os.chdir(folder)
        self._connection = QueueConnection()
        self._ending: str | None = None
        self._asked_s = time.monotonic()
        self._early: dict[int, Command] = {}
        """What the controller said later than something that has not come yet."""
        self._num_applied = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, name="weft-rank", daemon=True).start()
        threading.Thread(target=self._end_forsaken, name="weft-forsaken", daemon=True).start()

    def where(self) -> ActorHost:
        """The node that it is on."""
        import ray

        return ActorHost(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def obey(self, number: int, command: Command) -> None:
        """Passes something on that the controller said, in the order of the numbers, which begin at 0."""
        with self._lock:
            self._early[number] = command
            while self._num_applied in self._early:
                self._connection.commands.put(self._early.pop(self._num_applied))
                self._num_applied += 1

    def hear(self) -> Heard:
        """What the rank has told since the last call; waits a little for something."""
        self._asked_s = time.monotonic()
        # Looked at first: what it told before its end is there by then.
        ending = self._ending
        reports: list[Report] = []
        with suppress(queue.Empty):
            reports.append(self._connection.reports.get(timeout=0.0 if ending else HEAR_S))
            while True:
                reports.append(self._connection.reports.get_nowait())
        return Heard(tuple(reports), ending)

    def _serve(self) -> None:
        ending = "ended"
        try:
            from weft.parallel.replicas.rank import run_rank

            run_rank(self._connection)
        except BaseException as error:
            ending = f"ended with {type(error).__name__}: {error}"
        self._ending = ending

    def _end_forsaken(self) -> None:
        while time.monotonic() - self._asked_s < CONTROLLER_LOST_S:
            time.sleep(LOOK_S)
            if self._ending is not None:
                return
        # Threads may be writing; what they write appears whole or not at all.
        os._exit(1)


def take_over(variables: Mapping[str, str | None]) -> None:
    """Sets variables of this process's environment; None unsets one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
