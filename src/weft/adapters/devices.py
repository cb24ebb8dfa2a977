"""The devices over which every layer of a model is divided, and the two places where they meet.

A linear whose outputs are divided reads the same x everywhere: each device finds a part of dx, and the parts add up. A
linear whose inputs are divided finds a part of y everywhere, and these add up. Sums are made in the order of the
devices and in fp32, so that all devices have the same bits, every time; another number of devices has others.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from weft.adapters.side_by_side import Turns


class Devices(ABC):
    """One of several devices that run the same operations on parts of the same layers."""

    index: int
    """Its own place among them."""
    count: int
    """How many there are."""
    turns: Turns | None = None
    """While two passes run side by side: whose turn it is."""
    runs_pairs: bool = False
    """Whether some passes of what is run now are side by side: then none is recorded, since two take turns."""
    waited_s: float = 0.0
    """Seconds in which a host has waited for others, so far, while one pass ran alone."""
    can_be_recorded: bool = False
    """Whether an exchange can be recorded with the launches around it, to be replayed as one graph."""

    @abstractmethod
    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Starts to exchange tensors of one shape; what is returned waits for those of all devices, in their order.

        All start at once. Passes that run side by side, 0 and 1, do not hear each other's.
        """

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What all devices give, in their order; the pass beside this one, if any, computes meanwhile."""
        if self.turns is None:
            begun_s = time.perf_counter()
            found = self.start(tensor, 0)()
            self.waited_s += time.perf_counter() - begun_s
            return found
        wait = self.start(tensor, self.turns.pass_number)
        self.turns.hand_over()
        return wait()

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of what all devices give, in a tensor of its own; layers meet nowhere else."""
        first, *others = self.gather(tensor)
        total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for other in others:
            total += other
        return total.to(tensor.dtype)


def sum_forward(y: torch.Tensor, devices: Devices) -> torch.Tensor:
    """The whole result from the parts that the devices have; its gradient is that of every part."""
    whole: torch.Tensor = _SumForward.apply(y, devices)  # type: ignore[no-untyped-call]
    return whole


def sum_backward(x: torch.Tensor, devices: Devices) -> torch.Tensor:
    """X itself; on the way back the devices' parts of its gradient are added up."""
    same: torch.Tensor = _SumBackward.apply(x, devices)  # type: ignore[no-untyped-call]
    return same


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, devices: Devices) -> torch.Tensor:
        return devices.add_up(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, devices: Devices) -> torch.Tensor:
        ctx.devices = devices
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.devices.add_up(dx), None
