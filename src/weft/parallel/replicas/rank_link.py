"""How a controller reaches a rank, whatever starts its process: one handle each, and one inbox for what all tell."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from weft.parallel.replicas.messages import Command, Report


@dataclass(frozen=True)
class RankEnded(Report):
    """The process of a rank is gone; the last that is heard of it."""

    how: str
    is_accident: bool = False
    """It was not its own doing, so another process in its place may fare better."""


class CommandLine(Protocol):
    """Takes commands to a rank."""

    def send(self, command: Command, /) -> None:
        """Says something."""
        ...


@dataclass
class RankHandle:
    """A rank as its controller reaches it."""

    index: int
    connection: CommandLine | None = None
    """None until it has joined and been told how to set itself up."""
    heard_s: float = field(default_factory=time.monotonic)
    """When it last gave a sign of life."""
    num_sent: int = 0
    """Commands sent to it."""
    is_taken: bool = False
    """A process has joined as this rank."""
    has_hung_up: threading.Event = field(default_factory=threading.Event)
    """All that it has told is in the inbox."""

    def send(self, command: Command) -> None:
        """Tells it something; one that is gone does not hear it, and the inbox says so soon."""
        with suppress(OSError):
            if self.connection is not None:
                self.num_sent += 1
                self.connection.send(command)


Inbox = queue.SimpleQueue[tuple[RankHandle, Report]]


class Ranks(Protocol):
    """Brings ranks into being, hears them, and ends them."""

    @property
    def inbox(self) -> Inbox:
        """What they tell, in the order in which it came; `RankEnded` is the last of each."""
        ...

    def start(self, index: int) -> RankHandle:
        """Starts a rank, or waits for one to join; `RankReady` tells when it can be used."""
        ...

    def kill(self, rank: RankHandle) -> None:
        """Ends a rank at once: it does nothing for this controller any more."""
        ...

    def close(self) -> None:
        """Ends all ranks."""
        ...
