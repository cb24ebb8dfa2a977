"""Ranks as processes that a controller starts on its own machine, and ends."""

from __future__ import annotations

import os
import secrets
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weft.parallel.replicas.messages import EndRank, RankJoined, RankOrder
from weft.parallel.replicas.rank_link import Inbox, RankEnded, RankHandle
from weft.parallel.replicas.rank_listener import KEY_VARIABLE, RankListener
from weft.processes import ChildProcess
from weft.store.run_lock import ScratchFolder

PROGRAM = "weft.cli.main"
END_S = 10.0
"""Seconds a rank has to end by itself."""
LAST_WORDS_S = 1.0
"""Seconds that are left to read what a rank told before it ended."""


@dataclass
class RankProcess(RankHandle):
    """A rank in a process of this machine."""

    process: ChildProcess | subprocess.Popen[bytes] = field(kw_only=True)
    log: Path = field(kw_only=True)


class RankPool:
    """All rank processes of one controller."""

    def __init__(self, order: RankOrder, variables: Sequence[Mapping[str, str]]) -> None:
        """`variables`: of each rank's environment, such as the GPU it sees."""
        self._variables = variables
        self._scratch = ScratchFolder("ranks")
        self._folder = self._scratch.path
        self._key = secrets.token_hex(16)
        self.ranks: dict[int, RankProcess] = {}
        """Those that run or are being started, by index."""
        self._lock = threading.Lock()
        self._listener = RankListener(str(self._folder / "socket"), self._key, order, self._find)

    @property
    def inbox(self) -> Inbox:
        """What they tell, in the order in which it came; `RankEnded` is the last of each."""
        return self._listener.inbox

    def start(self, index: int) -> RankHandle:
        """Starts a rank; `RankReady` tells when it can be used."""
        log = self._folder / f"weft-rank-{index}.log"
        variables = {**os.environ, **self._variables[index], KEY_VARIABLE: self._key}
        with self._lock:
            process = self.launch(str(self._folder / "socket"), variables, log)
            rank = self.ranks[index] = RankProcess(index, process=process, log=log)
        threading.Thread(target=self._await_end, args=(rank,), name=f"weft-rank-{index}", daemon=True).start()
        return rank

    def launch(self, address: str, variables: Mapping[str, str], log: Path) -> ChildProcess | subprocess.Popen[bytes]:
        """The process of a rank, which connects to that address; other pools may have other ones."""
        return ChildProcess(PROGRAM, ("rank", "--connect", address), variables=variables, name=log.stem, log=log)

    def kill(self, rank: RankHandle) -> None:
        """Ends a rank at once; returns when it is gone."""
        assert isinstance(rank, RankProcess)
        rank.process.kill()
        rank.process.wait()

    def close(self) -> None:
        """Ends all ranks and removes what they left outside the run directory."""
        ranks = list(self.ranks.values())
        for rank in ranks:
            rank.send(EndRank())
        until = time.monotonic() + END_S
        for rank in ranks:
            if rank.connection is not None:
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, until - time.monotonic()))
            # One that has not joined yet has nothing to save, and would not hear that it is over.
            self.kill(rank)
        self._listener.close()
        self._scratch.close()

    def _find(self, joined: RankJoined) -> RankHandle | None:
        """The rank that a process is."""
        with self._lock:
            for rank in self.ranks.values():
                if rank.process.pid == joined.pid and not rank.is_taken:
                    rank.is_taken = True
                    return rank
        return None

    def _await_end(self, rank: RankProcess) -> None:
        try:
            code = rank.process.wait()
        except OSError as error:
            self.inbox.put((rank, RankEnded(f"cannot be started ({error})")))
            return
        # What it told comes before that it is gone. A process that it left behind may keep the connection open.
        if rank.is_taken:
            rank.has_hung_up.wait(LAST_WORDS_S)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        words = self._last_words(rank) if code > 0 else ""
        self.inbox.put((rank, RankEnded(f"{how}: {words}" if words else how, is_accident=code < 0)))

    def _last_words(self, rank: RankProcess) -> str:
        """The last line that a rank printed."""
        with suppress(OSError):
            lines = [line for line in rank.log.read_text(errors="replace").splitlines() if line.strip()]
            return lines[-1].strip() if lines else ""
        return ""
