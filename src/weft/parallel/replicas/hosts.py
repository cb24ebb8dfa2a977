"""Where the ranks of a run are, and what opens them: processes of this machine, or ranks that join over the network.

No torch is imported here, so that ranks start before it is.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.parallel.replicas.connections import (
    KEY_VARIABLE,
    Address,
    Inbox,
    RankEnded,
    RankHandle,
    RankListener,
    Ranks,
    address_of,
    hang_up,
)
from weft.parallel.replicas.messages import EndRank, RankJoined, RankOrder
from weft.parallel.replicas.rank_group import RankGroup
from weft.processes import (
    VISIBLE,
    ChildProcess,
    check_cpu_processes,
    choose_gpus,
    last_line,
    number_or_auto,
    visible_gpus,
)
from weft.spec import BackboneSpec, JobSpec, RunSpec
from weft.store.owner import ScratchFolder

if TYPE_CHECKING:
    from weft.parallel.stages.load_stages import StageLayout


@dataclass(frozen=True)
class ReplicaHosts:
    number: int
    open_ranks: Callable[[RankOrder], Ranks]
    manner: str = "each in a process of its own"
    """Words for the user about how the ranks run."""
    invitation: str = ""

    def start(self, order: RankOrder) -> RankGroup:
        return RankGroup(self.open_ranks(order), self.number)


def local_hosts(replicas: str | None, devices: str | None, backbone: BackboneSpec) -> ReplicaHosts | None:
    """Processes of this machine; None where one replica in the controller's own process is enough."""
    variables = rank_variables(replicas, devices, backbone)
    if len(variables) == 1 and devices is None:
        return None
    return ReplicaHosts(len(variables), lambda order: RankPool(order, variables))


def layout_hosts(divided: Sequence[StageLayout | None], gpus: Sequence[str | None]) -> ReplicaHosts:
    """Processes of this machine, each with its own division; `gpus`: the one that a whole replica's process sees."""
    variables = [{} if gpu is None else {VISIBLE: gpu} for gpu in gpus]
    return ReplicaHosts(len(divided), lambda order: RankPool(replace(order, layouts=divided), variables))


def joined_hosts(listen: str, replicas: str | None) -> ReplicaHosts:
    """Machines on which a user starts a `weft rank` that connects to this address."""
    number = None if replicas is None else number_or_auto(replicas, "--replicas", least=1)
    if number is None:
        raise ConfigError("needs --replicas with the number of ranks that will join.", where="--listen")
    address, key, command = join_command(listen)
    return ReplicaHosts(
        number,
        lambda order: JoinedRanks(order, address, key),
        manner="on the machines where they were started",
        invitation=f"start {number} of them with: {command}",
    )


def join_command(listen: str) -> tuple[Address, str, str]:
    """Returns the address to listen on, the key, and the command that joins from any machine."""
    address = address_of(listen, "--listen")
    if isinstance(address, str):
        raise ConfigError(f"got {listen!r}; accepted is HOST:PORT.", where="--listen")
    key = os.environ.get(KEY_VARIABLE)
    # When listening on all addresses, other machines use this machine's name.
    host = socket.getfqdn() if address[0] in ("0.0.0.0", "::") else address[0]
    command = f"weft rank --connect {host}:{address[1]}"
    if key is None:
        key = secrets.token_hex(16)
        command = f"{KEY_VARIABLE}={key} {command}"
    return address, key, command


def rank_variables(replicas: str | None, devices: str | None, backbone: BackboneSpec) -> list[dict[str, str]]:
    """Environment of each rank, with its GPU; ConfigError for more than there are."""
    number = None if replicas is None else number_or_auto(replicas, "--replicas", least=1)
    visible = visible_gpus()
    if backbone.device == "cpu" or (backbone.device == "auto" and not visible):
        if devices is not None:
            raise ConfigError("are for GPUs, and this run is on a CPU; use --replicas.", where="--devices")
        check_cpu_processes(number or 1, "--replicas")
        return [{} for _ in range(number or 1)]
    chosen = choose_gpus(devices, visible)
    number = number or len(chosen)
    if number > len(chosen):
        found = f"got {number}; there {'is' if len(chosen) == 1 else 'are'} {len(chosen)}"
        raise ConfigError(f"{found} GPU{'' if len(chosen) == 1 else 's'}.", where="--replicas")
    return [{VISIBLE: name} for name in chosen[:number]]


def rank_order(spec: RunSpec, jobs: Sequence[JobSpec], *, is_controlled: bool = False) -> RankOrder:
    """Set-up of every rank of a run; `jobs`: those to come, or some of each kind. `is_controlled`: decisions follow
    their reports before they continue, as in a sweep."""
    return RankOrder(
        backbone=spec.backbone,
        capacity=spec.capacity,
        longest=max(job.max_length for job in jobs),
        planner=spec.planner,
        adapters=tuple(job.adapter for job in jobs),
        have_any_order=any(job.gradient_sum == "any_order" for job in jobs),
        max_jobs=spec.max_jobs,
        memory_limit=spec.memory_limit,
        is_controlled=is_controlled,
        tenant_weights=dict(spec.tenant_weights),
    )


PROGRAM = "weft.cli.main"
END_S = 10.0
LAST_WORDS_S = 1.0
"""Seconds to receive a rank's reports after its end."""


@dataclass
class RankProcess(RankHandle):
    process: ChildProcess | subprocess.Popen[bytes] = field(kw_only=True)
    log: Path = field(kw_only=True)


class RankPool:
    def __init__(self, order: RankOrder, variables: Sequence[Mapping[str, str]]) -> None:
        self._variables = variables
        self._scratch = ScratchFolder("ranks")
        self._folder = self._scratch.path
        self._key = secrets.token_hex(16)
        self.ranks: dict[int, RankProcess] = {}
        self._lock = threading.Lock()
        self._listener = RankListener(str(self._folder / "socket"), self._key, order, self._find)

    @property
    def inbox(self) -> Inbox:
        return self._listener.inbox

    def start(self, index: int) -> RankHandle:
        log = self._folder / f"weft-rank-{index}.log"
        variables = {**os.environ, **self._variables[index], KEY_VARIABLE: self._key}
        with self._lock:
            process = self.launch(str(self._folder / "socket"), variables, log)
            rank = self.ranks[index] = RankProcess(index, process=process, log=log)
        threading.Thread(target=self._await_end, args=(rank,), name=f"weft-rank-{index}", daemon=True).start()
        return rank

    def launch(self, address: str, variables: Mapping[str, str], log: Path) -> ChildProcess | subprocess.Popen[bytes]:
        return ChildProcess(PROGRAM, ("rank", "--connect", address), variables=variables, name=log.stem, log=log)

    def kill(self, rank: RankHandle) -> None:
        assert isinstance(rank, RankProcess)
        rank.process.kill()
        rank.process.wait()

    def close(self) -> None:
        ranks = list(self.ranks.values())
        for rank in ranks:
            rank.send(EndRank())
        until = time.monotonic() + END_S
        for rank in ranks:
            if rank.connection is not None:
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, until - time.monotonic()))
            # One that has not joined yet has nothing to save and receives no commands.
            self.kill(rank)
        self._listener.close()
        self._scratch.close()

    def _find(self, joined: RankJoined) -> RankHandle | None:
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
        # Its reports come before its end. One of its child processes may keep the connection open.
        if rank.is_taken:
            rank.has_hung_up.wait(LAST_WORDS_S)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        words = last_line(rank.log) if code > 0 else ""
        self.inbox.put((rank, RankEnded(f"{how}: {words}" if words else how, is_accident=code < 0)))


@dataclass
class JoinedRank(RankHandle):
    host: str = ""


class JoinedRanks:
    """Ranks that join over the network. When a process is gone, the next one that joins takes its rank."""

    def __init__(self, order: RankOrder, address: Address, key: str) -> None:
        self._ranks: list[JoinedRank] = []
        self._lock = threading.Lock()
        try:
            self._listener = RankListener(address, key, order, self._find, self._report_exit)
        except OSError as error:
            found = f"cannot be listened on ({error.strerror or error})"
            raise ConfigError(f"{found}; name a free port of this machine.", where=_shown(address)) from None

    @property
    def inbox(self) -> Inbox:
        return self._listener.inbox

    def start(self, index: int) -> RankHandle:
        rank = JoinedRank(index)
        with self._lock:
            self._ranks = [*(other for other in self._ranks if other.index != index), rank]
        return rank

    def kill(self, rank: RankHandle) -> None:
        """Closes the connection: the process at the other end exits when it notices."""
        if rank.connection is not None:
            assert isinstance(rank.connection, Connection)
            hang_up(rank.connection)
        else:
            self._report_exit(rank)

    def close(self) -> None:
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
        with self._lock:
            for rank in sorted(self._ranks, key=lambda rank: rank.index):
                if not rank.is_taken:
                    rank.is_taken, rank.host = True, joined.host
                    return rank
        return None

    def _report_exit(self, rank: RankHandle) -> None:
        assert isinstance(rank, JoinedRank)
        how = f"on {rank.host} has gone" if rank.host else "was not joined"
        self.inbox.put((rank, RankEnded(how, is_accident=bool(rank.host))))


def _shown(address: Address) -> str:
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"
