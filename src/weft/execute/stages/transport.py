"""How tensors go from one stage to another: within one process, or between processes by torch.distributed.

What one stage sends another under one tag arrives in the order in which it was sent; tags keep activations, gradients
and what concerns a job's step apart. On GPUs no host waits: a stage computes on a stream of its own, and what crosses
is on its way meanwhile.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft.kernels.device import Stream, has_streams, mark, on_stream, wait_for

ACTIVATION, GRADIENT, FIRST_FREE = 0, 1, 2
"""Tags; those from `FIRST_FREE` on are for the steps of a program: even ones to a judge, odd ones from it."""
NUM_CHANNELS = FIRST_FREE + 2
"""Kinds of tags; what goes under one kind goes between two stages in one direction only."""


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


Parcel = tuple[torch.Tensor, Any]
"""What was sent, and a mark of the stream that made it."""
Boxes = defaultdict[tuple[int, int, int], deque[Parcel]]
"""What has been sent, by source, target and tag."""


class LocalTransport:
    """Between stages that take turns in one process; those of one GPU work at the same time, each on its stream."""

    def __init__(self, stage: int, boxes: Boxes) -> None:
        """`boxes` are shared by all stages."""
        self._stage = stage
        self._boxes = boxes

    def send(self, tensor: torch.Tensor, to_stage: int, tag: int) -> None:
        """Puts it where the other finds it."""
        self._boxes[self._stage, to_stage, tag].append((tensor, mark(tensor.device)))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, tag: int) -> torch.Tensor | None:
        """What lies there, or None: the other stage must have its turn first."""
        box = self._boxes[from_stage, self._stage, tag]
        if not box:
            return None
        tensor, ready = box.popleft()
        assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype, "stages disagree about what is sent"
        wait_for(tensor, ready)
        return tensor

    def finish(self) -> None:
        """Has nothing to wait for."""


class TorchTransport:
    """Between processes of torch.distributed: gloo on CPUs, where receiving waits, or NCCL.

    Every kind of tag has a group, and so communicators of its own: those of NCCL do one thing after another, and know
    no tags, so that under NCCL stages must measure steps in one order. What is received comes on a stream that waits
    for no computing.
    """

    def __init__(self, device: torch.device, tensor: int = 0, num_tensor: int = 1) -> None:
        """All processes of the default group make theirs at the same time.

        Among `num_tensor` processes that share a stage, each talks to those that have its own place in others.
        """
        self._tensor, self._num_tensor = tensor, num_tensor
        self._device = device
        self._groups = [dist.new_group() for _ in range(NUM_CHANNELS)]
        self._leaving: list[tuple[dist.Work | None, torch.Tensor]] = []
        streams = [Stream(device) for _ in self._groups] if has_streams(device) else []
        self._streams = dict(enumerate(streams))

    def send(self, tensor: torch.Tensor, to_stage: int, tag: int) -> None:
        """Starts to send it; it is kept until it has left."""
        self._leaving = [(work, kept) for work, kept in self._leaving if work is not None and not work.is_completed()]
        tensor = tensor.contiguous()
        self._leaving.append(
            (dist.isend(tensor, self._process(to_stage), group=self._groups[_channel(tag)], tag=tag), tensor)
        )

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, tag: int) -> torch.Tensor:
        """Waits for it; on a GPU only what is launched from now on does."""
        channel = _channel(tag)
        with nullcontext() if channel not in self._streams else on_stream(self._streams[channel]):
            tensor = torch.empty(*shape, dtype=dtype, device=self._device)
            dist.recv(tensor, self._process(from_stage), group=self._groups[channel], tag=tag)
            ready = mark(self._device)
        wait_for(tensor, ready)
        return tensor

    def finish(self) -> None:
        """Waits for the other side to take it."""
        for work, _ in self._leaving:
            if work is not None:
                work.wait()
        self._leaving.clear()

    def _process(self, stage: int) -> int:
        return stage * self._num_tensor + self._tensor


def _channel(tag: int) -> int:
    """The kind of a tag."""
    return tag if tag < FIRST_FREE else FIRST_FREE + (tag - FIRST_FREE) % 2
