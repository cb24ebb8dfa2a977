"""The rank processes of a controller: starts them, hears what they tell, and ends them.

Each connects back to a socket that only holders of a key can use. What they tell lies in one inbox, in the order in
which it came; that a process has ended is told there too.
"""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Protocol

from weft.errors import ConfigError, JobError
from weft.replicas.messages import Command, EndRank, RankFailed, RankJoined, RankOrder, Report
from weft.store.run_dir import library_versions

KEY_VARIABLE = "WEFT_RANK_KEY"
"""Holds the key of the socket, which is not for other users to see in a list of processes."""
END_S = 10.0
"""Seconds a rank has to end by itself."""
LAST_WORDS_S = 1.0
"""Seconds that are left to read what a rank told before it ended."""


@dataclass(frozen=True)
class RankEnded(Report):
    """The process of a rank is gone."""

    how: str


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

    def send(self, command: Command) -> None:
        """Tells it something; one that is gone does not hear it, and the inbox says so soon."""
        with suppress(OSError):
            if self.connection is not None:
                self.num_sent += 1
                self.connection.send(command)


class Ranks(Protocol):
    """Starts the ranks of a controller, hears them, and ends them."""

    @property
    def inbox(self) -> queue.SimpleQueue[tuple[RankHandle, Report]]:
        """What they tell, in the order in which it came; `RankEnded` is the last of each."""
        ...

    def start(self, index: int) -> RankHandle:
        """Starts a rank; `RankReady` tells when it can be used."""
        ...

    def kill(self, rank: RankHandle) -> None:
        """Ends a rank at once; returns when it is gone."""
        ...

    def close(self) -> None:
        """Ends all ranks."""
        ...


@dataclass
class RankProcess(RankHandle):
    """A rank in a process of this machine."""

    process: subprocess.Popen[bytes] = field(kw_only=True)
    log: Path = field(kw_only=True)
    reader: threading.Thread | None = None
    """Hears what it tells."""


class RankPool:
    """All rank processes of one controller."""

    def __init__(self, order: RankOrder, variables: Sequence[Mapping[str, str]]) -> None:
        """`variables`: of each rank's environment, such as the GPU it sees."""
        self._order = order
        self._variables = variables
        self._folder = Path(tempfile.mkdtemp(prefix="weft-ranks-"))
        self._key = secrets.token_hex(16)
        self._listener = Listener(str(self._folder / "socket"), backlog=64, authkey=self._key.encode())
        self.inbox: queue.SimpleQueue[tuple[RankHandle, Report]] = queue.SimpleQueue()
        self.ranks: dict[int, RankProcess] = {}
        """Those that run or are being started, by index."""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="weft-ranks", daemon=True).start()

    def start(self, index: int) -> RankHandle:
        """Starts a rank; `RankReady` tells when it can be used."""
        log = self._folder / f"rank-{index}.log"
        variables = {**os.environ, **self._variables[index], KEY_VARIABLE: self._key}
        process = self.launch(index, str(self._folder / "socket"), variables, log)
        rank = RankProcess(index, process=process, log=log)
        with self._lock:
            self.ranks[index] = rank
        threading.Thread(target=self._await_end, args=(rank,), name=f"weft-rank-{index}", daemon=True).start()
        return rank

    def launch(self, index: int, address: str, variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """The process of a rank, which connects to that address; other pools may have theirs elsewhere."""
        command = [sys.executable, "-m", "weft", "rank", "--connect", address, "--index", str(index)]
        with log.open("ab") as out:
            return subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def kill(self, rank: RankHandle) -> None:
        """Ends a rank at once; returns when it is gone."""
        assert isinstance(rank, RankProcess)
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()

    def close(self) -> None:
        """Ends all ranks and removes what they left outside the run directory."""
        for rank in list(self.ranks.values()):
            rank.send(EndRank())
        until = time.monotonic() + END_S
        for rank in list(self.ranks.values()):
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))
            self.kill(rank)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def last_words(self, rank: RankProcess) -> str:
        """The last line that a rank printed."""
        with suppress(OSError):
            lines = [line for line in rank.log.read_text(errors="replace").splitlines() if line.strip()]
            return lines[-1].strip() if lines else ""
        return ""

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):
                # Somebody without the key, or a rank that died as it joined.
                continue
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Connection) -> None:
        """Hears one rank until its connection ends."""
        with suppress(EOFError, OSError):
            joined = connection.recv()
            assert isinstance(joined, RankJoined), "a rank says first who it is"
            with self._lock:
                rank = self.ranks.get(joined.index)
            if rank is None or rank.process.pid != joined.pid:
                return
            difference = version_difference(joined)
            if difference is not None:
                self.inbox.put((rank, RankFailed(difference)))
                return
            rank.reader, rank.heard_s = threading.current_thread(), time.monotonic()
            connection.send(self._order)
            # Only now: from here on another thread may send, and the order comes first.
            rank.connection = connection
            while True:
                report = connection.recv()
                rank.heard_s = time.monotonic()
                self.inbox.put((rank, report))

    def _await_end(self, rank: RankProcess) -> None:
        code = rank.process.wait()
        if rank.reader is not None:
            # What it told comes before that it is gone. A process that it left behind may keep the connection open.
            rank.reader.join(LAST_WORDS_S)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        words = self.last_words(rank) if code > 0 else ""
        self.inbox.put((rank, RankEnded(f"{how}: {words}" if words else how)))


def version_difference(joined: RankJoined) -> ConfigError | None:
    """Why a rank cannot work with this controller: other libraries give other bits."""
    own = library_versions()
    for name in sorted(own.keys() | joined.versions.keys()):
        here, there = own.get(name, "none"), joined.versions.get(name, "none")
        if here != there:
            found = f"has {name} {there}, the controller {here}; results would differ in their last bits"
            return ConfigError(f"{found}. Install the same versions everywhere.", where=f"rank {joined.index}")
    return None


def no_ranks_left(how: str) -> JobError:
    """What ends a run whose ranks all end again and again."""
    hint = "Every job goes on from its last checkpoint with --resume."
    return JobError(f"no replica is left: the last one {how}.", hint=hint)
