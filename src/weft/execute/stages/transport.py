"""How tensors go from one stage to another: within one process, or between processes by torch.distributed.

What one stage sends another under one tag arrives in the order in which it was sent; tags keep activations, gradients
and what concerns a job's step apart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

ACTIVATION, GRADIENT, FIRST_FREE = 0, 1, 2
"""Tags; those from `FIRST_FREE` on are for the steps of a program."""


class Transport(Protocol):
    """What one stage sends to others and receives from them."""

    def send(self, tensor: torch.Tensor, to_stage: int, tag: int) -> None:
        """Starts to send a tensor, which nobody changes any more."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, tag: int) -> torch.Tensor | None:
        """The next tensor that was sent; None where it has not been, and waiting for it would not help."""
        ...

    def finish(self) -> None:
        """Until all that was sent has left."""
        ...


Boxes = defaultdict[tuple[int, int, int], deque[torch.Tensor]]
"""What has been sent, by source, target and tag."""


class LocalTransport:
    """Between stages that take turns in one process."""

    def __init__(self, stage: int, boxes: Boxes) -> None:
        """`boxes` are shared by all stages."""
        self._stage = stage
        self._boxes = boxes

    def send(self, tensor: torch.Tensor, to_stage: int, tag: int) -> None:
        """Puts it where the other finds it."""
        self._boxes[self._stage, to_stage, tag].append(tensor)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, tag: int) -> torch.Tensor | None:
        """What lies there, or None: the other stage must have its turn first."""
        box = self._boxes[from_stage, self._stage, tag]
        if not box:
            return None
        tensor = box.popleft()
        assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype, "stages disagree about what is sent"
        return tensor

    def finish(self) -> None:
        """Has nothing to wait for."""


class TorchTransport:
    """Between processes of a group of torch.distributed; receiving waits."""

    def __init__(self) -> None:
        self._leaving: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to_stage: int, tag: int) -> None:
        """Starts to send it; it is kept until it has left."""
        self._leaving = [(work, kept) for work, kept in self._leaving if work is not None and not work.is_completed()]
        tensor = tensor.contiguous()
        self._leaving.append((dist.isend(tensor, to_stage, tag=tag), tensor))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, tag: int) -> torch.Tensor:
        """Waits for it."""
        tensor = torch.empty(*shape, dtype=dtype)
        dist.recv(tensor, from_stage, tag=tag)
        return tensor

    def finish(self) -> None:
        """Waits for the other side to take it."""
        for work, _ in self._leaving:
            if work is not None:
                work.wait()
        self._leaving.clear()
