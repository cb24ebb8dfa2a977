"""How tensors go from one stage to another: within one process, or between processes by torch.distributed.

What one stage sends another by one channel arrives in the order in which it was sent; channels keep activations,
gradients and what concerns a job's step apart. On GPUs no host waits: a stage computes on a stream of its own, and what
crosses is on its way meanwhile.
"""

from __future__ import annotations

import datetime
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft.kernels.device import Stream, has_streams, mark, on_stream, wait_for


class Channel(IntEnum):
    """Kinds of what stages send."""

    ACTIVATION = 0
    """To the next stage."""
    GRADIENT = 1
    """To the one before."""
    PART = 2
    """Of a job's gradient, to its judge: the first stage that has one."""
    NORM = 3
    """Of the judge, to every stage that steps."""
    CHOICE = 4
    """The next tokens of answers, from the last stage to all before it."""


@dataclass(frozen=True, order=True)
class Route:
    """A channel from one stage to another."""

    channel: Channel
    source: int
    target: int

    @property
    def direction(self) -> tuple[Channel, bool]:
        """The channel, and whether it goes to a later stage."""
        return self.channel, self.target > self.source


DIRECTIONS = (
    (Channel.ACTIVATION, True),
    (Channel.GRADIENT, False),
    (Channel.PART, False),
    (Channel.NORM, True),
    (Channel.NORM, False),
    (Channel.CHOICE, False),
)
"""All there are: a job's judge need not be on the first replica, if that had no sample of it."""


class StageGoneError(Exception):
    """The process at the other end is gone; whoever coordinates the stages hears of it too."""


class Transport(Protocol):
    """What one stage sends to others and receives from them."""

    def open(self, routes: Collection[Route]) -> None:
        """Makes ways ready that will be taken; all stages ask for the same ones, before anything else."""
        ...

    def send(self, tensor: torch.Tensor, to_stage: int, channel: Channel) -> None:
        """Starts to send a tensor, which nobody changes any more."""
        ...

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, channel: Channel
    ) -> torch.Tensor | None:
        """The next tensor that was sent; None where it has not been, and waiting for it would not help."""
        ...

    def finish(self) -> None:
        """Until all that was sent has left."""
        ...


Parcel = tuple[torch.Tensor, Any]
"""What was sent, and a mark of the stream that made it."""
Boxes = defaultdict[Route, deque[Parcel]]
"""What has been sent, by its way."""


class LocalTransport:
    """Between stages that take turns in one process; those of one GPU work at the same time, each on its stream."""

    def __init__(self, stage: int, boxes: Boxes) -> None:
        """`boxes` are shared by all stages."""
        self._stage = stage
        self._boxes = boxes
        self._missed: Route | None = None

    @property
    def awaited(self) -> Route | None:
        """On which way something was looked for in vain in this turn, and still is not there; None: it may go on."""
        return self._missed if self._missed is not None and not self._boxes[self._missed] else None

    def begin_turn(self) -> None:
        """Its stage runs now, until it must wait."""
        self._missed = None

    def open(self, routes: Collection[Route]) -> None:
        """Has nothing to make ready; says no to ways that processes would not have."""
        assert all(route.direction in DIRECTIONS for route in routes)

    def send(self, tensor: torch.Tensor, to_stage: int, channel: Channel) -> None:
        """Puts it where the other finds it."""
        self._boxes[Route(channel, self._stage, to_stage)].append((tensor, mark(tensor.device)))

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, channel: Channel
    ) -> torch.Tensor | None:
        """What lies there, or None: the other stage must have its turn first."""
        route = Route(channel, from_stage, self._stage)
        box = self._boxes[route]
        if not box:
            self._missed = route
            return None
        tensor, ready = box.popleft()
        assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype, "stages disagree about what is sent"
        wait_for(tensor, ready)
        return tensor

    def finish(self) -> None:
        """Has nothing to wait for."""


class TorchTransport:
    """Between processes of torch.distributed: gloo on CPUs, where receiving waits, or NCCL.

    Every channel has a group for each direction, and so communicators of its own: those of NCCL do one thing after
    another, so that one that sent and received would wait for itself. What is received comes on a stream that waits
    for no computing.
    """

    def __init__(
        self, stage: int, device: torch.device, longest_wait: datetime.timedelta, tensor: int = 0, num_tensor: int = 1
    ) -> None:
        """All processes of the default group make theirs at the same time.

        Among `num_tensor` processes that share a stage, each talks to those that have its own place in others.
        """
        self._stage = stage
        self._tensor, self._num_tensor = tensor, num_tensor
        self._device = device
        self._groups = {direction: dist.new_group(timeout=longest_wait) for direction in DIRECTIONS}
        self._open: set[Route] = set()
        self._leaving: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._streams = {direction: Stream(device) for direction in DIRECTIONS} if has_streams(device) else {}

    def open(self, routes: Collection[Route]) -> None:
        """Sends a number along each of its own ways that is new, in an order that all have.

        NCCL connects two processes when they first send, and both wait for it: in the middle of a program each might
        wait for the other.
        """
        for route in sorted({*routes} - self._open):
            if route.source == self._stage:
                self.send(torch.zeros(1, device=self._device), route.target, route.channel)
            elif route.target == self._stage:
                # One that is gone is missed when something is expected of it.
                with suppress(StageGoneError):
                    self.receive((1,), torch.float32, route.source, route.channel)
        self._open |= {*routes}

    def send(self, tensor: torch.Tensor, to_stage: int, channel: Channel) -> None:
        """Starts to send it; it is kept until it has left. To one that is gone nothing leaves."""
        self._leaving = [(work, kept) for work, kept in self._leaving if work is not None and not work.is_completed()]
        tensor = tensor.contiguous()
        group = self._groups[Route(channel, self._stage, to_stage).direction]
        with suppress(RuntimeError):
            self._leaving.append((dist.isend(tensor, self._process(to_stage), group=group), tensor))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, channel: Channel) -> torch.Tensor:
        """Waits for it; on a GPU only what is launched from now on does. StageGoneError if nobody sends it."""
        direction = Route(channel, from_stage, self._stage).direction
        with on_stream(self._streams[direction]) if self._streams else nullcontext():
            tensor = self._room(shape, dtype)
            try:
                dist.recv(tensor, self._process(from_stage), group=self._groups[direction])
            except RuntimeError as error:
                raise StageGoneError(str(error)) from None
            ready = mark(self._device)
        wait_for(tensor, ready)
        return tensor

    def finish(self) -> None:
        """Waits for the other side to take it."""
        for work, _ in self._leaving:
            if work is not None:
                with suppress(RuntimeError):
                    work.wait()
        self._leaving.clear()

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Where something is received."""
        return torch.empty(*shape, dtype=dtype, device=self._device)

    def _process(self, stage: int) -> int:
        return stage * self._num_tensor + self._tensor
