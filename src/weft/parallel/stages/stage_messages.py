"""What a coordinator and the processes of its stages tell each other, besides questions."""

from __future__ import annotations

import io
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from weft.engine.execute.protocol import ReplicaFaultError
from weft.errors import JobError
from weft.model.model_part import ModelPart
from weft.parallel.stages.stage import StagePosition
from weft.spec import BackboneSpec

JOIN = "join"
"""The first request to a process: to meet all stages through a file."""


@dataclass(frozen=True)
class StageOrder:
    """What a stage is to be."""

    place: StagePosition
    backbone: BackboneSpec
    part: ModelPart
    num_devices: int
    """Stages of all replicas."""
    tensor: int
    """The place among the processes that share the stage's layers."""
    num_tensor: int
    """How many those are; 1: it has its layers alone."""
    rings: tuple[tuple[int, ...], ...] = ()
    """Stages that share the frozen weights of the same layers, wherever there are any."""
    backend: str = "gloo"
    """By what they talk to each other, as torch.distributed names it."""
    memory_limit: float | str | None = None
    """What it may take of its GPU."""

    @property
    def ring(self) -> tuple[int, ...]:
        """The stages that share its frozen weights, itself included; empty: it has them alone."""
        return next((ring for ring in self.rings if self.place.device in ring), ())

    @property
    def process(self) -> int:
        """Its number among all processes."""
        return self.place.device * self.num_tensor + self.tensor


@dataclass(frozen=True)
class StageAnswer:
    """What a stage found, or what it raised."""

    number: int
    """Of the question."""
    found: Any = None
    error: Exception | None = None


class StageMemoryError(JobError, ReplicaFaultError):
    """A stage ran out of memory in the middle of what all do together, so that none can go on."""


@dataclass(frozen=True)
class StageAlive:
    """A sign of life."""


class _Copies(ForkingPickler):
    """Multiprocessing's own way, but for tensors, whose memory it would share: these go as their bytes."""

    def reducer_override(self, what: Any) -> Any:
        """How a tensor is made again; all else is made as ever."""
        if not isinstance(what, torch.Tensor):
            return NotImplemented
        data = what.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, what.dtype, tuple(what.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def tell(connection: Connection, what: Any) -> None:
    """Sends plain values and tensors."""
    buffer = io.BytesIO()
    _Copies(buffer).dump(what)
    connection.send_bytes(buffer.getvalue())


def hear(connection: Connection) -> Any:
    """The next thing that was sent; waits for it."""
    return connection.recv()
