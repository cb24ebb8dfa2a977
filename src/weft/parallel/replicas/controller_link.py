"""A rank's side of the connection to its controller."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Protocol

from weft.parallel.replicas.messages import ALIVE_S, RankAlive, Report


class RankConnection(Protocol):
    """A rank's way to its controller and back: that of another process, or queues of its own."""

    def send(self, report: Report, /) -> None:
        """Tells the controller something."""
        ...

    def recv(self) -> Any:
        """The next thing that the controller said; waits for it."""
        ...

    def poll(self) -> bool:
        """Whether there is something that the controller said."""
        ...


class ControllerLink:
    """The connection to the controller; several threads may tell it something."""

    def __init__(self, connection: RankConnection) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        """Whoever has it may send."""

    def tell(self, report: Report) -> None:
        """Sends a report."""
        with self.lock:
            self.connection.send(report)

    def keep_alive(self) -> None:
        """Gives signs of life from now on, whatever the process is busy with."""

        def beat() -> None:
            while True:
                time.sleep(ALIVE_S)
                try:
                    self.tell(RankAlive())
                except OSError:
                    os._exit(1)

        threading.Thread(target=beat, name="weft-alive", daemon=True).start()
