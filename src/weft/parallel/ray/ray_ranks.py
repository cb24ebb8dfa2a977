"""The ranks of a controller as actors of a Ray cluster.

Each has its own placement group, which a replacement of a dead rank takes over: when a node is lost, Ray finds other
room for each group by itself, but for one group of all ranks only if there were room for all. Ray restarts no actor:
the controller decides which rank continues which job.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from weft.errors import ConfigError, WeftError, first_line
from weft.parallel.ray.connect import ClusterConnection, ReplicaRequest, in_words
from weft.parallel.ray.rank_actor import ActorHost, RankActor, ReportBatch
from weft.parallel.replicas.connections import Inbox, RankEnded, RankHandle, version_difference
from weft.parallel.replicas.messages import Command, EndRank, RankFailed, RankJoined, RankOrder, Report, SetUp

ROOM_S = 30.0
"""Seconds in which a cluster has to find room for all replicas."""
END_S = 10.0
NUM_CALLS = 8
"""Concurrent calls of an actor: one waits for reports, the others are commands."""
TAKEN_OVER = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that every rank copies from its controller: the number of threads decides bits on a CPU."""
CONNECTION_ERRORS = (RayError, ConnectionError, RuntimeError)
"""Errors of a call when an actor, or the connection to the cluster, is gone."""

LOST = "the cluster does not answer any more"


class ActorLine:
    def __init__(self, actor: Any, connection: ClusterConnection) -> None:
        self._actor, self._connection = actor, connection
        self._numbers = itertools.count()

    def send(self, command: Command) -> None:
        with suppress(*CONNECTION_ERRORS):
            if not self._connection.is_lost:
                self._actor.apply.remote(next(self._numbers), command)


@dataclass
class RayRank(RankHandle):
    actor: Any = None
    host: ActorHost | None = None
    pid: int | None = None
    is_gone: threading.Event = field(default_factory=threading.Event)

    @property
    def on_node(self) -> str:
        return f"on {self.host.address}" if self.host is not None else "on the cluster"


class RayRanks:
    def __init__(
        self,
        order: RankOrder,
        request: ReplicaRequest,
        connection: ClusterConnection,
        group: PlacementGroup | None = None,
    ) -> None:
        """Reserves room for all replicas; ConfigError if there is none. `group`: the caller's placement group, with a
        bundle for each replica."""
        self._order = order
        self._connection = connection
        self._own_groups = [] if group is not None else _take_room(request)
        self._group = group
        self._resources = dict(request.bundle)
        self.inbox = Inbox()
        self._ranks: dict[int, RayRank] = {}
        self._kind: Any = ray.remote(RankActor)

    def start(self, index: int) -> RayRank:
        """Starts a rank; `RankReady` follows, or `RankEnded` if the cluster is gone."""
        rank = self._ranks[index] = RayRank(index)
        if self._connection.is_lost:
            self._report_end(rank, f"cannot be started: {LOST}")
            return rank
        resources = dict(self._resources)
        group, bundle = (self._own_groups[index], 0) if self._group is None else (self._group, index)
        rank.actor = self._kind.options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=0,
            max_concurrency=NUM_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote({name: os.environ.get(name) for name in TAKEN_OVER}, Path.cwd())
        threading.Thread(target=self._read, args=(rank,), name=f"weft-rank-{index}", daemon=True).start()
        return rank

    def kill(self, rank: RankHandle) -> None:
        assert isinstance(rank, RayRank)
        self._kill_actor(rank)
        if rank.host is not None and rank.pid is not None and not self._connection.is_lost:
            # Ray considers an actor dead before its process is, and waits some seconds for one that hangs.
            there = NodeAffinitySchedulingStrategy(rank.host.node_id, soft=False)
            with suppress(*CONNECTION_ERRORS, GetTimeoutError):
                ended = ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
                ray.get(ended.remote(rank.pid), timeout=END_S)
        rank.is_gone.wait(END_S)

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.send(EndRank())
        until = time.monotonic() + END_S
        for rank in self._ranks.values():
            left_s = until - time.monotonic() if rank.connection is not None else 0.0
            if not rank.is_gone.wait(max(0.0, left_s)):
                self.kill(rank)
        for group in [] if self._connection.is_lost else self._own_groups:
            with suppress(*CONNECTION_ERRORS):
                remove_placement_group(group)
        self._connection.close()

    def _read(self, rank: RayRank) -> None:
        """Receives one rank's reports until it is gone."""
        # What a failure of this thread leaves: else the controller would wait for the rank's next report for ever.
        how, is_accident = "is out of reach: its reports cannot be received", True
        try:
            rank.host = ray.get(rank.actor.where.remote())
            batch = ReportBatch(())
            while batch.ending is None:
                batch = ray.get(rank.actor.next_reports.remote())
                rank.last_seen_s = time.monotonic()
                for report in batch.reports:
                    self._take(rank, report)
            how, is_accident = batch.ending, False
        except CONNECTION_ERRORS as error:
            how = f"is out of reach: {LOST}" if self._connection.is_lost else _how(rank, error)
        finally:
            # One that was out of reach for a moment has lost reports, so it is ended.
            self._kill_actor(rank)
            self._report_end(rank, how, is_accident=is_accident)

    def _kill_actor(self, rank: RayRank) -> None:
        with suppress(*CONNECTION_ERRORS):
            if rank.actor is not None and not self._connection.is_lost:
                ray.kill(rank.actor)

    def _report_end(self, rank: RayRank, how: str, *, is_accident: bool = False) -> None:
        self.inbox.put((rank, RankEnded(how, is_accident)))
        rank.is_gone.set()

    def _take(self, rank: RayRank, report: Report) -> None:
        if isinstance(report, RankJoined):
            rank.pid = report.pid
            difference = version_difference(report, rank.index)
            if difference is None:
                line = ActorLine(rank.actor, self._connection)
                line.send(SetUp(rank.index, self._order))
                # Only now: from here on another thread may send, and the order comes first.
                rank.connection = line
                return
            self._kill_actor(rank)
            report = RankFailed(difference)
        if isinstance(report, RankFailed) and isinstance(report.error, WeftError):
            where = f"replica {rank.index} {rank.on_node}"
            known = f": {report.error.where}" if report.error.where else ""
            report = RankFailed(report.error.at(where + known))
        self.inbox.put((rank, report))


def end_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _take_room(request: ReplicaRequest) -> list[PlacementGroup]:
    """A placement group for each replica; ConfigError instead of waiting for machines that may never come."""
    groups = [placement_group([dict(request.bundle)]) for _ in range(request.number)]
    until = time.monotonic() + ROOM_S
    if all(group.wait(max(0.0, until - time.monotonic())) for group in groups):
        return groups
    for group in groups:
        remove_placement_group(group)
    free = {name: amount for name, amount in ray.available_resources().items() if name in request.bundle}
    found = f"no room for {request.number} times {in_words(request.bundle)} within {ROOM_S:g} s"
    raise ConfigError(f"{found}; free are {in_words(free) or 'none of these'}.", where="--replicas")


def _how(rank: RayRank, error: Exception) -> str:
    """Describes how a rank ended, from the error of a call."""
    return f"died {rank.on_node}" if rank.host is not None else f"cannot be started: {_cause(error)}"


def _cause(error: Exception) -> str:
    """The last line of Ray's message, which names the error of an actor that could not be made."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else first_line(error)
