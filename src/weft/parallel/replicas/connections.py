"""Connections between a controller and its ranks, whatever starts their processes.

Ranks connect to a socket file, or to HOST:PORT from other machines. The controller lets in holders of a key, sets them
up, and receives their reports in one inbox. What crosses a connection is pickled and not encrypted, so HOST:PORT
belongs on a trusted network. Without the key, nothing that a stranger sends is read.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, Protocol

from weft.errors import ConfigError
from weft.parallel.replicas.messages import (
    ALIVE_S,
    Command,
    RankAlive,
    RankFailed,
    RankJoined,
    RankOrder,
    RefuseRank,
    Report,
    SetUp,
)
from weft.store.run_dir import library_versions


@dataclass(frozen=True)
class RankEnded(Report):
    """The process of a rank is gone; its last report."""

    how: str
    is_accident: bool = False
    """True if a new process may succeed where this one ended."""


class CommandLine(Protocol):
    def send(self, command: Command, /) -> None: ...


@dataclass
class RankHandle:
    index: int
    connection: CommandLine | None = None
    last_seen_s: float = field(default_factory=time.monotonic)
    num_sent: int = 0
    is_taken: bool = False
    """True once a process has joined as this rank."""
    has_hung_up: threading.Event = field(default_factory=threading.Event)
    """Event that is set once all reports of the rank are in the inbox."""

    def send(self, command: Command) -> None:
        """Sends a command; a rank that is gone does not receive it, and the inbox will report that."""
        with suppress(OSError):
            if self.connection is not None:
                self.num_sent += 1
                self.connection.send(command)


Inbox = queue.SimpleQueue[tuple[RankHandle, Report]]


class Ranks(Protocol):
    @property
    def inbox(self) -> Inbox: ...

    def start(self, index: int) -> RankHandle:
        """Starts a rank, or waits for one to join; `RankReady` follows."""
        ...

    def kill(self, rank: RankHandle) -> None: ...

    def close(self) -> None: ...


class RankConnection(Protocol):
    def send(self, report: Report, /) -> None: ...

    def recv(self) -> Any: ...

    def poll(self) -> bool: ...


class ControllerLink:
    def __init__(self, connection: RankConnection) -> None:
        self.connection = connection
        self.lock = threading.Lock()

    def send(self, report: Report) -> None:
        with self.lock:
            self.connection.send(report)

    def keep_alive(self) -> None:
        """Sends signs of life from now on, whatever the process does."""

        def beat() -> None:
            while True:
                time.sleep(ALIVE_S)
                try:
                    self.send(RankAlive())
                except OSError:
                    os._exit(1)

        threading.Thread(target=beat, name="weft-alive", daemon=True).start()


KEY_VARIABLE = "WEFT_RANK_KEY"
"""Environment variable with the key of the socket, which must not show in a list of processes."""
Address = str | tuple[str, int]
HANDSHAKE_S = 20.0
"""Seconds in which a new connection has to authenticate itself."""
JOINS_AGAIN = 75
"""Exit code of a stage that has lost its controller, or was ended because another stage was lost."""
DEAD_S = 30
"""Seconds after which a machine that does not answer counts as gone."""


def address_of(text: str, where: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or "/" in text:
        return text
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"got {text!r}; accepted is HOST:PORT.", where=where)
    return host, int(port)


def connect(address: Address, key: str) -> Connection:
    """A rank's connection to its controller; OSError or AuthenticationError on failure."""
    connection = Client(address, authkey=key.encode())
    notice_dead(connection)
    return connection


def notice_dead(connection: Connection) -> None:
    """Makes a network connection end when the machine at its other end disappears."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        if link.family in (socket.AF_INET, socket.AF_INET6):
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)


def hang_up(connection: Connection) -> None:
    """Ends a connection for readers at both ends."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.shutdown(socket.SHUT_RDWR)


class KeyListener:
    """Lets processes in that hold a key; each is served by a thread of its own."""

    def __init__(self, address: Address, key: str, serve: Callable[[Connection, RankJoined], None]) -> None:
        """`serve`: called with the first report of a process; the connection is closed when it returns."""
        self._key, self._serve = key.encode(), serve
        self._listener = Listener(address, backlog=64)
        self.address: Address = self._listener.address
        threading.Thread(target=self._accept, name="weft-ranks", daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:
                return
            threading.Thread(target=self._let_in, args=(connection,), daemon=True).start()

    def _let_in(self, connection: Connection) -> None:
        """Serves one connection until it ends; without the key, or a message, nothing is read."""
        with suppress(EOFError, OSError, AuthenticationError), connection:
            notice_dead(connection)
            with _Patient(connection) as patient:
                deliver_challenge(patient, self._key)
                answer_challenge(patient, self._key)
            joined = connection.recv()
            assert isinstance(joined, RankJoined), "the first report of a rank"
            self._serve(connection, joined)


class RankListener(KeyListener):
    def __init__(
        self,
        address: Address,
        key: str,
        order: RankOrder,
        find: Callable[[RankJoined], RankHandle | None],
        on_end: Callable[[RankHandle], None] = lambda rank: None,
    ) -> None:
        """`find`: returns a free rank for a process that has joined, or None; `on_end`: called when it is gone."""
        self.inbox = Inbox()
        self._order = order
        self._find, self._on_end = find, on_end
        super().__init__(address, key, self._serve_rank)

    def _serve_rank(self, connection: Connection, joined: RankJoined) -> None:
        rank = self._find(joined)
        if rank is None:
            connection.send(RefuseRank(ConfigError("the run has all its ranks.", where="weft rank")))
            return
        try:
            self._receive_rank(rank, connection, joined)
        finally:
            rank.has_hung_up.set()
            self._on_end(rank)

    def _receive_rank(self, rank: RankHandle, connection: Connection, joined: RankJoined) -> None:
        difference = version_difference(joined, rank.index)
        if difference is not None:
            self.inbox.put((rank, RankFailed(difference)))
            connection.send(RefuseRank(difference))
            return
        rank.last_seen_s = time.monotonic()
        connection.send(SetUp(rank.index, self._order))
        # Only now: from here on another thread may send, and the order comes first.
        rank.connection = connection
        while True:
            report = connection.recv()
            rank.last_seen_s = time.monotonic()
            self.inbox.put((rank, report))


class _Patient(Connection):
    def __init__(self, connection: Connection) -> None:
        super().__init__(os.dup(connection.fileno()))

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        if not self.poll(HANDSHAKE_S):
            raise EOFError
        return super().recv_bytes(maxlength)


def version_difference(joined: RankJoined, index: int) -> ConfigError | None:
    """Error if a rank has other libraries than this controller, since these give other bits; else None."""
    own = library_versions()
    for name in sorted(own.keys() | joined.versions.keys()):
        here, there = own.get(name, "none"), joined.versions.get(name, "none")
        if here != there:
            found = (
                f"on {joined.host} has {name} {there}, the controller {here}; results would differ in their last bits"
            )
            return ConfigError(f"{found}. Install the same versions everywhere.", where=f"rank {index}")
    return None
