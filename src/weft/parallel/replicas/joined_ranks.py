"""Ranks that others start, on any machine, and that join a controller over the network."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from weft.errors import ConfigError
from weft.parallel.replicas.messages import EndRank, RankJoined, RankOrder
from weft.parallel.replicas.rank_link import Inbox, RankEnded, RankHandle
from weft.parallel.replicas.rank_listener import Address, RankListener, hang_up
from weft.parallel.replicas.rank_pool import END_S


@dataclass
class JoinedRank(RankHandle):
    """A rank that another machine may hold."""

    host: str = ""
    """Where it runs; empty until it has joined."""


class JoinedRanks:
    """Holds places for ranks. One whose process is gone is free again, for whoever joins next."""

    def __init__(self, order: RankOrder, address: Address, key: str) -> None:
        self._ranks: list[JoinedRank] = []
        self._lock = threading.Lock()
        try:
            self._listener = RankListener(address, key, order, self._find, self._report_exit)
        except OSError as error:
            said = f"cannot be listened on ({error.strerror or error})"
            raise ConfigError(f"{said}; name a free port of this machine.", where=_shown(address)) from None

    @property
    def inbox(self) -> Inbox:
        """What they tell, in the order in which it came; `RankEnded` is the last of each."""
        return self._listener.inbox

    def start(self, index: int) -> RankHandle:
        """Holds a place for a rank, which anybody may take who has the key."""
        rank = JoinedRank(index)
        with self._lock:
            self._ranks = [*(other for other in self._ranks if other.index != index), rank]
        return rank

    def kill(self, rank: RankHandle) -> None:
        """Hangs up: the process at the other end ends when it notices, and is not heard meanwhile."""
        if rank.connection is not None:
            assert isinstance(rank.connection, Connection)
            hang_up(rank.connection)
        else:
            self._report_exit(rank)

    def close(self) -> None:
        """Tells all ranks that it is over, and waits a while for them to write their files."""
        with self._lock:
            ranks = [rank for rank in self._ranks if rank.connection is not None]
        for rank in ranks:
            rank.send(EndRank())
        until = time.monotonic() + END_S
        for rank in ranks:
            rank.has_hung_up.wait(max(0.0, until - time.monotonic()))
            self.kill(rank)
        self._listener.close()

    def _find(self, joined: RankJoined) -> RankHandle | None:
        """Takes the first free place."""
        with self._lock:
            for rank in sorted(self._ranks, key=lambda rank: rank.index):
                if not rank.is_taken:
                    rank.is_taken, rank.host = True, joined.host
                    return rank
        return None

    def _report_exit(self, rank: RankHandle) -> None:
        assert isinstance(rank, JoinedRank)
        how = f"on {rank.host} has gone" if rank.host else "was joined by nobody"
        self.inbox.put((rank, RankEnded(how, is_accident=bool(rank.host))))


def _shown(address: Address) -> str:
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"
