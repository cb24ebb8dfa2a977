"""Ranks as threads of the test process: they do all that rank processes do, and cost no import."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from weft.parallel.replicas.connections import ControllerLink, RankEnded, RankHandle
from weft.parallel.replicas.messages import EndRank, RankAlive, RankFailed, RankOrder, Report
from weft.parallel.replicas.rank import Rank
from weft.spec import JobSpec

_LOADING = threading.Lock()
"""transformers loads one model at a time in a process."""


class Vanished(BaseException):
    """The rank is gone from one moment to the next."""


class FragileConnection:
    """A rank's side of its connection, on which the rank can die at any use."""

    def __init__(self, connection: Connection, life: int | None) -> None:
        self._connection = connection
        self.life = life
        """Uses until it dies; None: it lives."""
        self.is_stalled = threading.Event()

    def send(self, report: Report) -> None:
        self._live()
        self._connection.send(report)

    def recv(self) -> Any:
        while not self._connection.poll(0.01):
            self._live(0)
        return self._connection.recv()

    def poll(self) -> bool:
        self._live()
        return self._connection.poll()

    def close(self) -> None:
        self._connection.close()

    def beat(self) -> None:
        """Gives a sign of life, unless nothing moves here."""
        if not self.is_stalled.is_set():
            self._connection.send(RankAlive())

    def _live(self, cost: int = 1) -> None:
        while self.is_stalled.is_set() and self.life is None:
            time.sleep(0.01)
        if self.life is not None:
            if self.life <= 0:
                raise Vanished
            self.life -= cost


class ThreadRank(RankHandle):
    """One rank, and the thread it is."""

    def __init__(self, index: int, life: int | None) -> None:
        self.connection, theirs = Pipe()
        super().__init__(index, self.connection)
        self.theirs = FragileConnection(theirs, life)
        self.thread = threading.Thread(target=lambda: None)
        self.rank: Rank | None = None


class ThreadRanks:
    """All ranks of a controller in one process; `life` gives how long each that is started lives."""

    def __init__(self, order: RankOrder, *, life: Callable[[int], int | None] = lambda index: None) -> None:
        self._order = order
        self._life = life
        self.inbox: queue.SimpleQueue[tuple[RankHandle, Report]] = queue.SimpleQueue()
        self.started: list[ThreadRank] = []
        self.problems: list[str] = []

    def start(self, index: int) -> ThreadRank:
        rank = ThreadRank(index, self._life(index))
        rank.thread = threading.Thread(target=self._serve, args=(rank,), daemon=True)
        rank.thread.start()
        threading.Thread(target=self._read, args=(rank,), daemon=True).start()
        self.started.append(rank)
        return rank

    def kill(self, rank: RankHandle) -> None:
        assert isinstance(rank, ThreadRank)
        rank.theirs.life = 0
        rank.thread.join()

    def close(self) -> None:
        for rank in self.started:
            rank.send(EndRank())
        for rank in self.started:
            rank.thread.join(20)
            assert not rank.thread.is_alive(), "a rank does not end on request"
        assert not self.problems

    def _serve(self, handle: ThreadRank) -> None:
        link = ControllerLink(handle.theirs)  # type: ignore[arg-type]
        threading.Thread(target=self._beat, args=(handle, link), daemon=True).start()
        try:
            with _LOADING:
                handle.rank = Rank(link, self._order, handle.index)
            self._watch(handle)
            handle.rank.serve()
        except Vanished:
            pass
        except Exception as error:
            handle.theirs.life = None
            link.send(RankFailed(error))
        finally:
            if handle.rank is not None:
                # What a process was writing is whole or not there; a thread finishes it before anybody else goes on.
                handle.rank.close()
            handle.theirs.close()

    def _beat(self, handle: ThreadRank, link: ControllerLink) -> None:
        with suppress(OSError):
            while handle.thread.is_alive():
                with link.lock:
                    handle.theirs.beat()
                time.sleep(0.1)

    def _watch(self, handle: ThreadRank) -> None:
        """Notes it if a job is given to this rank while another one has it."""
        assert handle.rank is not None
        submit = handle.rank.engine.submit

        def watched(spec: JobSpec, *args: Any, **options: Any) -> None:
            for other in self.started:
                if other is not handle and other.thread.is_alive() and other.rank is not None:
                    job = other.rank.engine.jobs.get(spec.name)
                    if job is not None and not job.state.is_final:
                        self.problems.append(f"{spec.name} is on replicas {other.index} and {handle.index}")
            submit(spec, *args, **options)

        handle.rank.engine.submit = watched  # type: ignore[method-assign]

    def _read(self, rank: ThreadRank) -> None:
        assert rank.connection is not None
        try:
            while True:
                report = rank.connection.recv()
                rank.last_seen_s = time.monotonic()
                self.inbox.put((rank, report))
        except (EOFError, OSError):
            rank.thread.join()
            self.inbox.put((rank, RankEnded("vanished")))
