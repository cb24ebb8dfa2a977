"""A stage in a process of its own: it answers what its coordinator asks, and ends when that is gone."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from weft.engine.execute.memory import load_part_within_memory
from weft.engine.execute.protocol import ReplicaMemoryError
from weft.errors import WeftError
from weft.model.out_of_memory import is_out_of_memory
from weft.model.resolve import resolve
from weft.model.shards.peers import TorchHostPeers, TorchPeers
from weft.parallel.stages.host_transport import HostTransport
from weft.parallel.stages.stage import Stage
from weft.parallel.stages.stage_devices import goes_through_host
from weft.parallel.stages.stage_group import RunningStage, answer
from weft.parallel.stages.stage_messages import JOIN, StageAlive, StageAnswer, StageMemoryError, StageOrder, hear, tell
from weft.parallel.stages.tensor_devices import TorchDevices, join_devices, tensor_devices
from weft.parallel.stages.transport import TorchTransport, Transport

ALIVE_S = 1.0
"""Seconds from one sign of life to the next."""
LONGEST_WAIT = datetime.timedelta(hours=12)
"""For another stage. The coordinator ends all stages when one is gone or silent, so nobody waits for that long."""


def main(connection: Connection) -> None:
    """Serves the coordinator at the other end of a pipe."""
    # Whoever wonders what a stage waits for asks with `kill -USR1`, and reads it in the stage's log.
    faulthandler.register(signal.SIGUSR1)
    lock = threading.Lock()

    def say(what: StageAnswer | StageAlive) -> None:
        try:
            with lock:
                tell(connection, what)
        except OSError:
            # The coordinator is gone; nothing that this process has is worth keeping.
            os._exit(1)

    def beat() -> None:
        while True:
            say(StageAlive())
            time.sleep(ALIVE_S)

    threading.Thread(target=beat, name="weft-alive", daemon=True).start()
    try:
        member = _loaded(hear(connection), say)
        if member is not None:
            _serve(member, connection, say)
    except EOFError:
        os._exit(0)


def _loaded(order: StageOrder, say: Callable[[StageAnswer], None]) -> StageMember | None:
    """The stage, or None once what keeps it from being loaded is told."""
    try:
        member = StageMember(order)
    except Exception as error:
        say(StageAnswer(0, error=tellable(error, order.place.device)))
        return None
    say(StageAnswer(0))
    return member


def _serve(member: StageMember, connection: Connection, say: Callable[[StageAnswer], None]) -> None:
    """Answers questions; those that come while programs go on, between two instructions."""
    going: RunningStage | None = None
    while True:
        if going is not None and going.has_work and not connection.poll():
            number = going.oldest
            try:
                for number, outcome in going.turn():
                    say(StageAnswer(number, outcome))
            except Exception as error:
                _report_failure(member, number, error, say)
            continue
        number, what, given = hear(connection)
        if what == "append":
            going = going if going is not None and going.stage is member.stage else RunningStage(member.stage)
            going.append(number, *given)
        elif what == "go_on":
            assert going is not None, "a program goes on that was begun"
            going.go_on(*given)
        else:
            try:
                found = StageAnswer(number, _answered(member, what, given))
            except Exception as error:
                _report_failure(member, number, error, say, what)
                continue
            say(found)


def _report_failure(
    member: StageMember, number: int, error: Exception, say: Callable[[StageAnswer], None], what: str = ""
) -> None:
    found = tellable(error, member.device, what)
    if not isinstance(found, WeftError | ReplicaMemoryError):
        # Whoever waits for this stage hears of it by that.
        member.leave()
    say(StageAnswer(number, error=found))


def tellable(error: Exception, stage: int, what: str = "") -> Exception:
    """An error as it can cross a pipe, whoever raised it; `what` the stage was asked."""
    if isinstance(error, WeftError) or (what == "seat" and isinstance(error, ReplicaMemoryError)):
        return error
    if isinstance(error, ReplicaMemoryError) or is_out_of_memory(error):
        hint = "Every job goes on from its last checkpoint with --resume."
        found = "its GPU ran out of memory; lower capacity, set recompute: full, or divide the model over more devices."
        return StageMemoryError(found, where=f"stage {stage}", hint=hint)
    return RuntimeError(f"{type(error).__name__}: {error}")


class StageMember:
    """A stage whose layers are loaded, and that joins the others then."""

    def __init__(self, order: StageOrder) -> None:
        self._order = order
        model = resolve(order.backbone)
        device = model.device
        self._is_by_host = goes_through_host(device, order.backend)
        self._peers: TorchPeers | None = None
        if ring := order.ring:
            kind = TorchHostPeers if self._is_by_host else TorchPeers
            self._peers = kind(ring.index(order.place.device), len(ring), device)
        self._devices: TorchDevices | None = None
        if order.num_tensor > 1:
            self._devices = tensor_devices(order.tensor, order.num_tensor, device, order.backend)
        self._backbone = load_part_within_memory(model, order.memory_limit, order.part, self._peers, self._devices)
        self._stage: Stage | None = None

    @property
    def device(self) -> int:
        """Its number among all stages."""
        return self._order.place.device

    @property
    def stage(self) -> Stage:
        """The stage, once it has joined the others."""
        assert self._stage is not None, "a stage joins the others first"
        return self._stage

    def join(self, store: str) -> None:
        """Meets all others through a file."""
        order, backbone = self._order, self._backbone
        self.leave()
        dist.init_process_group(
            order.backend,
            init_method=f"file://{store}",
            rank=order.process,
            world_size=order.num_devices * order.num_tensor,
            timeout=LONGEST_WAIT,
        )
        for ring in order.rings:
            # What is gathered and what is sent do not wait for each other.
            group = dist.new_group(ring, timeout=LONGEST_WAIT)
            if self._peers is not None and ring == order.ring:
                self._peers.group = group
                assert backbone.ring is not None
                backbone.ring.restart()
        if self._devices is not None:
            self._devices.groups = join_devices(order.place.device, order.num_devices, order.num_tensor, LONGEST_WAIT)
        transport = self._transport()
        if self._stage is None:
            self._stage = Stage(order.place, backbone, transport)
        self._stage.transport = transport

    def _transport(self) -> Transport:
        order, device = self._order, self._backbone.device
        if self._is_by_host:
            return HostTransport(order.place.device, device, LONGEST_WAIT, order.tensor, order.num_tensor)
        return TorchTransport(order.place.device, device, LONGEST_WAIT, order.tensor, order.num_tensor)

    def leave(self) -> None:
        """Hangs up on all others, if it has met them."""
        if not dist.is_initialized():
            return
        if self._stage is not None:
            # It holds on to the connections.
            del self._stage.transport
        if self._peers is not None:
            self._peers.group = None
        dist.destroy_process_group()
        gc.collect()


def _answered(member: StageMember, what: str, given: tuple[Any, ...]) -> Any:
    """Lets the stage run to its answer; receiving waits, so it never has to give others a turn."""
    if what == JOIN:
        member.join(*given)
        return None
    stage = member.stage
    running: Generator[None, None, Any] = answer(stage, what, given)
    while True:
        try:
            with stage.at_work():
                next(running)
        except StopIteration as end:
            return end.value
