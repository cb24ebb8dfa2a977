"""The ranks of a controller as actors of a Ray cluster.

Each has a placement group of its own, and the one that takes the place of a dead rank has the same: where a node is
lost, Ray finds other room for each group by itself, and would for one of all ranks only if there were room for all. Ray
restarts nobody: who goes on with which job is for the controller to decide.
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
from weft.parallel.ray.connect import ClusterConnection
from weft.parallel.ray.rank_actor import ActorHost, Heard, RankActor
from weft.parallel.ray.resources import ReplicaRequest, in_words
from weft.parallel.replicas.messages import Command, EndRank, RankFailed, RankJoined, RankOrder, Report, SetUp
from weft.parallel.replicas.rank_link import Inbox, RankEnded, RankHandle
from weft.parallel.replicas.rank_listener import version_difference

PLACE_S = 30.0
"""Seconds that a cluster has to find room for all replicas."""
END_S = 10.0
"""Seconds a rank has to end by itself, and then to be ended."""
NUM_CALLS = 8
"""Calls of an actor that can be under way at a time: one hears, the others are commands."""
TAKEN_OVER = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that every rank has as its controller has them: the number of threads decides bits on a CPU."""
CONNECTION_ERRORS = (RayError, ConnectionError, RuntimeError)
"""What a call raises when an actor, or the way to the cluster, is gone."""

LOST = "the cluster does not answer any more"


class ActorLine:
    """What a controller says to an actor; it goes at once, and is obeyed in this order."""

    def __init__(self, actor: Any, connection: ClusterConnection) -> None:
        self._actor, self._connection = actor, connection
        self._numbers = itertools.count()

    def send(self, command: Command) -> None:
        """Says something, and waits for nothing."""
        with suppress(*CONNECTION_ERRORS):
            if not self._connection.is_lost:
                self._actor.obey.remote(next(self._numbers), command)


@dataclass
class RayRank(RankHandle):
    """A rank in an actor."""

    actor: Any = None
    place: ActorHost | None = None
    """None until it runs."""
    pid: int | None = None
    is_gone: threading.Event = field(default_factory=threading.Event)

    @property
    def on_node(self) -> str:
        """Where it is, for a sentence."""
        return f"on {self.place.address}" if self.place is not None else "on the cluster"


class RayRanks:
    """All ranks of one controller on a cluster."""

    def __init__(
        self,
        order: RankOrder,
        request: ReplicaRequest,
        connection: ClusterConnection,
        group: PlacementGroup | None = None,
    ) -> None:
        """Takes room for all replicas, or raises ConfigError; `group` has room of its owner's, a bundle for each."""
        self._order = order
        self._connection = connection
        self._own_groups = [] if group is not None else _take_room(request)
        self._group = group
        self._resources = dict(request.bundle)
        self.inbox = Inbox()
        self._ranks: dict[int, RayRank] = {}
        self._kind: Any = ray.remote(RankActor)

    def start(self, index: int) -> RayRank:
        """Starts a rank; `RankReady` tells when it can be used, `RankEnded` that there is no cluster any more."""
        rank = self._ranks[index] = RayRank(index)
        if self._connection.is_lost:
            self._tell_end(rank, f"cannot be started: {LOST}")
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
        """Ends a rank at once; returns when it is gone."""
        assert isinstance(rank, RayRank)
        self._kill_actor(rank)
        if rank.place is not None and rank.pid is not None and not self._connection.is_lost:
            # Ray takes an actor for dead before its process is, and waits some seconds for one that hangs.
            there = NodeAffinitySchedulingStrategy(rank.place.node_id, soft=False)
            with suppress(*CONNECTION_ERRORS, GetTimeoutError):
                ended = ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
                ray.get(ended.remote(rank.pid), timeout=END_S)
        rank.is_gone.wait(END_S)

    def close(self) -> None:
        """Ends all ranks and gives their room back."""
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
        """Hears one rank until it is gone."""
        how, is_accident = "ended", False
        try:
            rank.place = ray.get(rank.actor.where.remote())
            heard = Heard(())
            while heard.ending is None:
                heard = ray.get(rank.actor.hear.remote())
                rank.heard_s = time.monotonic()
                for report in heard.reports:
                    self._take(rank, report)
            how = heard.ending
        except CONNECTION_ERRORS as error:
            how = f"is out of reach: {LOST}" if self._connection.is_lost else _how(rank, error)
            is_accident = True
        # One that is out of reach for a moment has lost what it was telling: it is as good as dead.
        self._kill_actor(rank)
        self._tell_end(rank, how, is_accident=is_accident)

    def _kill_actor(self, rank: RayRank) -> None:
        with suppress(*CONNECTION_ERRORS):
            if rank.actor is not None and not self._connection.is_lost:
                ray.kill(rank.actor)

    def _tell_end(self, rank: RayRank, how: str, *, is_accident: bool = False) -> None:
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
    """Ends a process of this machine, and waits until it does nothing any more."""
    with suppress(ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _take_room(request: ReplicaRequest) -> list[PlacementGroup]:
    """A placement group for each replica, or ConfigError; nobody waits for machines that may never come."""
    groups = [placement_group([dict(request.bundle)]) for _ in range(request.number)]
    until = time.monotonic() + PLACE_S
    if all(group.wait(max(0.0, until - time.monotonic())) for group in groups):
        return groups
    for group in groups:
        remove_placement_group(group)
    free = {name: amount for name, amount in ray.available_resources().items() if name in request.bundle}
    found = f"no room for {request.number} times {in_words(request.bundle)} within {PLACE_S:g} s"
    raise ConfigError(f"{found}; free are {in_words(free) or 'none of these'}.", where="--replicas")


def _how(rank: RayRank, error: Exception) -> str:
    """How a rank ended, by what a call of it raised."""
    return f"died {rank.on_node}" if rank.place is not None else f"cannot be started: {_cause(error)}"


def _cause(error: Exception) -> str:
    """The last line of what Ray says, which names the error of an actor that could not be made."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else first_line(error)
