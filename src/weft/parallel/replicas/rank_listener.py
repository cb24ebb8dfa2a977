"""Where ranks connect to their controller: it lets in holders of a key, sets them up, and hears what they tell.

They connect to a socket file, or to HOST:PORT from other machines. What crosses a connection is pickled and not
encrypted, so HOST:PORT belongs on a network that one trusts. Without the key, nothing that a stranger sends is read.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge

from weft.errors import ConfigError
from weft.parallel.replicas.messages import RankFailed, RankJoined, RankOrder, RefuseRank, SetUp
from weft.parallel.replicas.rank_link import Inbox, RankHandle
from weft.store.run_record import library_versions

KEY_VARIABLE = "WEFT_RANK_KEY"
"""Holds the key of the socket, which is not for other users to see in a list of processes."""
Address = str | tuple[str, int]
HANDSHAKE_S = 20.0
"""Seconds that whoever connects has to say who it is."""
DEAD_S = 30
"""Seconds after which a machine that does not answer any more counts as gone."""


def address_of(text: str, where: str) -> Address:
    """A socket file's path, or a host and a port."""
    host, colon, port = text.rpartition(":")
    if not colon or "/" in text:
        return text
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"got {text!r}; accepted is HOST:PORT.", where=where)
    return host, int(port)


def connect(address: Address, key: str) -> Connection:
    """A rank's connection to its controller; OSError or AuthenticationError if there is none to be had."""
    connection = Client(address, authkey=key.encode())
    notice_dead(connection)
    return connection


def notice_dead(connection: Connection) -> None:
    """Lets a connection over a network end when the machine at its other end is gone without a word."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        if link.family in (socket.AF_INET, socket.AF_INET6):
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)


def hang_up(connection: Connection) -> None:
    """Ends a connection for whoever reads from it, at both ends."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.shutdown(socket.SHUT_RDWR)


class RankListener:
    """Lets ranks in, and puts what they tell into an inbox."""

    def __init__(
        self,
        address: Address,
        key: str,
        order: RankOrder,
        find: Callable[[RankJoined], RankHandle | None],
        on_end: Callable[[RankHandle], None] = lambda rank: None,
    ) -> None:
        """`find` takes a place for a process that has joined, None if there is none; `on_end` hears that it is gone."""
        self.inbox = Inbox()
        self._order, self._key = order, key.encode()
        self._find, self._on_end = find, on_end
        self._listener = Listener(address, backlog=64)
        self.address: Address = self._listener.address
        threading.Thread(target=self._accept, name="weft-ranks", daemon=True).start()

    def close(self) -> None:
        """Lets nobody in any more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:
                return
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: Connection) -> None:
        """Hears one rank until its connection ends; whoever has no key, or says nothing, is not heard."""
        with suppress(EOFError, OSError, AuthenticationError), connection:
            notice_dead(connection)
            with _Patient(connection) as patient:
                deliver_challenge(patient, self._key)
                answer_challenge(patient, self._key)
            joined = connection.recv()
            assert isinstance(joined, RankJoined), "a rank says first who it is"
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
        rank.heard_s = time.monotonic()
        connection.send(SetUp(rank.index, self._order))
        # Only now: from here on another thread may send, and the order comes first.
        rank.connection = connection
        while True:
            report = connection.recv()
            rank.heard_s = time.monotonic()
            self.inbox.put((rank, report))


class _Patient(Connection):
    """A connection on which nobody is waited for without end."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(os.dup(connection.fileno()))

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        if not self.poll(HANDSHAKE_S):
            raise EOFError
        return super().recv_bytes(maxlength)


def version_difference(joined: RankJoined, index: int) -> ConfigError | None:
    """Why a rank cannot work with this controller: other libraries give other bits."""
    own = library_versions()
    for name in sorted(own.keys() | joined.versions.keys()):
        here, there = own.get(name, "none"), joined.versions.get(name, "none")
        if here != there:
            found = (
                f"on {joined.host} has {name} {there}, the controller {here}; results would differ in their last bits"
            )
            return ConfigError(f"{found}. Install the same versions everywhere.", where=f"rank {index}")
    return None
