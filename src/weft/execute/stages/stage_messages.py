"""What a coordinator and the processes of its stages tell each other, besides questions."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from weft.backbone.model_part import ModelPart
from weft.spec import BackboneSpec


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


def tell(connection: Connection, what: Any) -> None:
    """Sends plain values and tensors as bytes; multiprocessing's own way would share the memory of tensors."""
    connection.send_bytes(pickle.dumps(what))


def hear(connection: Connection) -> Any:
    """The next thing that was sent; waits for it."""
    return pickle.loads(connection.recv_bytes())
