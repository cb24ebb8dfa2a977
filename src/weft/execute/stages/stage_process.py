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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from weft.backbone.load import load_backbone
from weft.backbone.model_part import ModelPart
from weft.errors import WeftError
from weft.execute.stages.stage import Stage
from weft.execute.stages.stage_group import answer
from weft.execute.stages.transport import TorchTransport
from weft.spec import BackboneSpec

ALIVE_S = 1.0
"""Seconds from one sign of life to the next."""
LONGEST_WAIT = datetime.timedelta(hours=12)
"""For another stage. The coordinator ends all stages when one is gone or silent, so nobody waits for that long."""


@dataclass(frozen=True)
class StageOrder:
    """What a stage is to be."""

    index: int
    backbone: BackboneSpec
    parts: tuple[ModelPart, ...]
    """Of all stages."""
    store: str
    """A file through which the stages find each other."""


@dataclass(frozen=True)
class StageAnswer:
    """What a stage found, or what it raised."""

    found: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class StageAlive:
    """A sign of life."""


def main() -> None:
    """Serves the coordinator at the other end of a pipe."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    lock = threading.Lock()

    def tell(what: StageAnswer | StageAlive) -> None:
        try:
            with lock:
                connection.send(what)
        except OSError:
            # The coordinator is gone; nothing that this process has is worth keeping.
            os._exit(1)

    def beat() -> None:
        while True:
            tell(StageAlive())
            time.sleep(ALIVE_S)

    threading.Thread(target=beat, name="weft-alive", daemon=True).start()
    try:
        stage = _loaded(connection.recv(), tell)
        while stage is not None:
            what, given = connection.recv()
            try:
                found = StageAnswer(_answered(stage, what, given))
            except Exception as error:
                found = StageAnswer(error=tellable(error))
            tell(found)
    except EOFError:
        os._exit(0)


def _loaded(order: StageOrder, tell: Callable[[StageAnswer], None]) -> Stage | None:
    """The stage, or None once what keeps it from being loaded is told."""
    try:
        stage = load_stage(order)
    except Exception as error:
        tell(StageAnswer(error=tellable(error)))
        return None
    tell(StageAnswer())
    return stage


def tellable(error: Exception) -> Exception:
    """An error as it can cross a pipe, whoever raised it."""
    return error if isinstance(error, WeftError) else RuntimeError(f"{type(error).__name__}: {error}")


def load_stage(order: StageOrder) -> Stage:
    """Loads the layers of a stage and joins the others."""
    backbone = load_backbone(order.backbone, order.parts[order.index])
    num_stages = len(order.parts)
    store = dist.FileStore(order.store, num_stages)
    dist.init_process_group("gloo", store=store, rank=order.index, world_size=num_stages, timeout=LONGEST_WAIT)
    return Stage(order.index, num_stages, backbone, TorchTransport())


def _answered(stage: Stage, what: str, given: tuple[Any, ...]) -> Any:
    """Lets the stage run to its answer; receiving waits, so it never has to give others a turn."""
    running: Generator[None, None, Any] = answer(stage, what, given)
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value


if __name__ == "__main__":
    main()
