"""Processes of one layout that join over the network, each with the device that it sees.

When one is lost, all end and join again by themselves (`weft rank`), unless a machine is gone. Those beyond the number
that a layout needs wait, and take the place of a lost one. Stages exchange tensors directly, over connections that
torch.distributed makes: neither encrypted nor protected by the key.
"""

from __future__ import annotations

import datetime
import os
import queue
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from weft.errors import ConfigError, JobError, counted
from weft.parallel.replicas.connections import Address, KeyListener, hang_up, version_difference
from weft.parallel.replicas.messages import BeStage, EndRank, RankJoined, RefuseRank
from weft.parallel.replicas.rank_group import JOIN_S
from weft.parallel.stages.stage_process import END, send_message
from weft.parallel.stages.transport import LOCALHOST, choose_backend


@dataclass
class JoinedStage:
    connection: Connection
    joined: RankJoined
    _is_over: bool = False

    @property
    def device(self) -> tuple[str, str]:
        return self.joined.host, self.joined.gpu

    @property
    def is_gone(self) -> bool:
        """True if a process that has not been sent anything yet has hung up."""
        return self._is_over or self.connection.poll()

    def wait_begun(self) -> None:
        pass

    def dismiss(self) -> None:
        with suppress(OSError):
            send_message(self.connection, (0, END, ()))

    def wait(self, timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        with suppress(EOFError, OSError):
            while not self._is_over:
                left = None if until is None else max(0.0, until - time.monotonic())
                if not self.connection.poll(left):
                    raise subprocess.TimeoutExpired(self.joined.host, timeout or 0.0)
                self.connection.recv_bytes()

    def kill(self) -> None:
        # It stays open here: a thread may be waiting for it.
        hang_up(self.connection)
        self._is_over = True

    def ending(self) -> str:
        return f"on {self.joined.host} has gone"


class JoinedStages:
    def __init__(self, address: Address, key: str) -> None:
        self._new = queue.SimpleQueue[JoinedStage | ConfigError]()
        self._spare: list[JoinedStage] = []
        self._gpus: list[str] = []
        self._store: Any = None
        try:
            self._listener = KeyListener(address, key, self._welcome)
        except OSError as error:
            found = f"cannot be listened on ({error.strerror or error})"
            raise ConfigError(f"{found}; name a free port of this machine.", where="--listen") from None

    @property
    def port(self) -> int:
        return int(self._listener.address[1])

    def start(self, number: int) -> list[JoinedStage]:
        """Waits until so many have joined; neighbours in the layout are on one machine where possible."""
        until = time.monotonic() + JOIN_S
        while len(self._spare) < number:
            try:
                joined = self._new.get(timeout=0.5)
            except queue.Empty:
                if time.monotonic() > until:
                    found = f"{len(self._spare)} of {counted(number, 'rank')} joined within {JOIN_S:g} s"
                    raise JobError(f"{found}; --resume waits for them again.", where="--listen") from None
            else:
                if isinstance(joined, ConfigError):
                    raise joined
                self._spare.append(joined)
            for stage in [stage for stage in self._spare if stage.is_gone]:
                stage.kill()
                self._spare.remove(stage)
        chosen = sorted(self._spare[:number], key=lambda stage: stage.device)
        self._spare = self._spare[number:]
        for stage in chosen:
            with suppress(OSError):  # it is noticed when its answer is awaited
                stage.connection.send(BeStage())
        self._gpus = ["/".join(stage.device) for stage in chosen if stage.joined.gpu]
        return chosen

    @property
    def backend(self) -> str:
        return choose_backend(self._gpus)

    def open_store(self) -> int:
        # Kept until the next one: stages may still be connecting.
        wait = datetime.timedelta(seconds=JOIN_S)
        store = dist.TCPStore(LOCALHOST, 0, is_master=True, timeout=wait, wait_for_workers=False)  # type: ignore[attr-defined]
        self._store = store
        return int(self._store.port)

    def close(self) -> None:
        """Does nothing: it closes one group of processes, and others may join for the next one."""

    def end(self) -> None:
        while not self._new.empty():
            joined = self._new.get()
            if isinstance(joined, JoinedStage):
                self._spare.append(joined)
        for stage in self._spare:
            with suppress(OSError):
                stage.connection.send(EndRank())
            stage.kill()
        self._listener.close()

    def _welcome(self, connection: Connection, joined: RankJoined) -> None:
        difference = version_difference(joined, joined.pid)
        if difference is not None:
            connection.send(RefuseRank(difference))
            self._new.put(difference)
            return
        self._new.put(JoinedStage(Connection(os.dup(connection.fileno())), joined))
