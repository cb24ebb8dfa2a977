"""A stage in a process of its own: it answers what its coordinator asks, and ends when that is gone.

Started as `python -m weft.execute.stages.stage_process FD`, with one end of a pipe.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from weft.backbone.load import choose_device, load_backbone
from weft.backbone.shards.peers import TorchHostPeers, TorchPeers
from weft.backbone.tensor_parallel import divide
from weft.errors import WeftError
from weft.execute.stages.host_transport import HostTransport
from weft.execute.stages.stage import Stage
from weft.execute.stages.stage_devices import goes_through_host
from weft.execute.stages.stage_group import answer
from weft.execute.stages.stage_messages import StageAlive, StageAnswer, StageOrder, hear, tell
from weft.execute.stages.tensor_devices import join_devices
from weft.execute.stages.transport import TorchTransport, Transport

ALIVE_S = 1.0
"""Seconds from one sign of life to the next."""
LONGEST_WAIT = datetime.timedelta(hours=12)
"""For another stage. The coordinator ends all stages when one is gone or silent, so nobody waits for that long."""


def main() -> None:
    """Serves the coordinator at the other end of a pipe."""
    connection = Connection(int(sys.argv[1]))
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
        stage = _loaded(hear(connection), say)
        while stage is not None:
            what, given = hear(connection)
            try:
                found = StageAnswer(_answered(stage, what, given))
            except Exception as error:
                found = StageAnswer(error=tellable(error))
            say(found)
    except EOFError:
        os._exit(0)


def _loaded(order: StageOrder, say: Callable[[StageAnswer], None]) -> Stage | None:
    """The stage, or None once what keeps it from being loaded is told."""
    try:
        stage = load_stage(order)
    except Exception as error:
        say(StageAnswer(error=tellable(error)))
        return None
    say(StageAnswer())
    return stage


def tellable(error: Exception) -> Exception:
    """An error as it can cross a pipe, whoever raised it."""
    return error if isinstance(error, WeftError) else RuntimeError(f"{type(error).__name__}: {error}")


def load_stage(order: StageOrder) -> Stage:
    """Loads the layers of a stage and joins the others."""
    device = choose_device(order.backbone)
    by_host = goes_through_host(device, order.backend)
    peers: TorchPeers | None = None
    if order.is_shard:
        peers = (TorchHostPeers if by_host else TorchPeers)(order.place.device, order.num_devices, device)
    backbone = load_backbone(order.backbone, order.part, peers)
    dist.init_process_group(
        order.backend,
        init_method=f"file://{order.store}",
        rank=order.process,
        world_size=order.num_devices * order.num_tensor,
        timeout=LONGEST_WAIT,
    )
    if peers is not None:
        # What is gathered and what is sent do not wait for each other.
        peers.group = dist.new_group(timeout=LONGEST_WAIT)
    if order.num_tensor > 1:
        divide(
            backbone, join_devices(order.place.device, order.num_devices, order.tensor, order.num_tensor, LONGEST_WAIT)
        )
    return Stage(order.place, backbone, _transport(order, backbone.device, by_host))


def _transport(order: StageOrder, device: torch.device, by_host: bool) -> Transport:
    if by_host:
        return HostTransport(order.place.device, device, LONGEST_WAIT)
    return TorchTransport(order.place.device, device, LONGEST_WAIT, order.tensor, order.num_tensor)


def _answered(stage: Stage, what: str, given: tuple[Any, ...]) -> Any:
    """Lets the stage run to its answer; receiving waits, so it never has to give others a turn."""
    running: Generator[None, None, Any] = answer(stage, what, given)
    while True:
        try:
            with stage.at_work():
                next(running)
        except StopIteration as end:
            return end.value


if __name__ == "__main__":
    main()
