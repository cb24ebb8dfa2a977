"""The devices over which every layer of a model is divided, and their shares of a site.

The frozen weight W (O, D) of a linear is divided by its outputs or by its inputs (`SiteShare`). With divided outputs
all devices read the same x, and each computes a part of dx; with divided inputs each computes a part of y. The parts
are added in the order of the devices and in fp32, so that all devices have the same bits, every time; another number of
devices gives other bits. An adapter's parameters stay whole on every device; AdamW's moments are divided. A slot
computes with the part that belongs to the device's outputs or inputs, and adds gradients to that part alone (LoRA: all
of A and some rows of B, or some columns of A and all of B). All methods that can be divided are linear in what is
divided, so the devices' gradients add up to the whole gradient.

Two passes of one device can take turns (`SideBySide`): one computes while the other waits for a sum. Each pass is a
thread, and only one runs at a time; on a GPU both launch on one stream. A pass hands over when it has started a sum
over the devices, and waits for that sum at its next turn. So the order of all operations follows from the two passes
alone: it is the same every time and on every device, and each pass computes what it would compute alone. Passes must
not write to the same tensors; each finds its own routing table again after a turn of the other."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weft.adapters.routing import Routing
from weft.kernels.device import as_here, join_thread


class Devices(ABC):
    """One of several devices that run the same operations on parts of the same layers."""

    index: int
    count: int
    turns: Turns | None = None
    """The two passes that run side by side at the moment, if any."""
    runs_pairs: bool = False
    """Whether some of the current passes run side by side: then none is recorded, since two take turns."""
    waited_s: float = 0.0
    """Seconds that the host has waited for other devices, while one pass ran alone."""
    can_be_recorded: bool = False
    """Whether an exchange can be recorded with the launches around it, to be replayed as one graph."""

    @abstractmethod
    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Starts an exchange of tensors of one shape. Returns a function that waits for the tensors of all devices, in
        order. All devices start together. Exchanges of the passes 0 and 1, which run side by side, are independent."""

    @abstractmethod
    def start_swap(self, parts: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """The same, but `parts` has a row for each device, and the function returns this device's row of all."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all devices, in order; the other pass, if there is one, computes meanwhile."""
        return self._exchanged(self.start, tensor)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all devices, in a new tensor. With more than two devices each adds up a part of the numbers and
        all gather the parts, so a device receives 2 (N - 1) / N tensors instead of N - 1; no bit depends on it."""
        if self.count <= 2:
            return _in_order(self.gather(tensor))
        size = -(-tensor.numel() // self.count)
        padded = torch.nn.functional.pad(tensor.reshape(-1), (0, self.count * size - tensor.numel()))
        own = _in_order(self._exchanged(self.start_swap, padded.view(self.count, size)))
        return torch.cat(self.gather(own))[: tensor.numel()].view(tensor.shape)

    def _exchanged(
        self, start: Callable[[torch.Tensor, int], Callable[[], list[torch.Tensor]]], tensor: torch.Tensor
    ) -> list[torch.Tensor]:
        if self.turns is None:
            begun_s = time.perf_counter()
            found = start(tensor, 0)()
            self.waited_s += time.perf_counter() - begun_s
            return found
        wait = start(tensor, self.turns.pass_number)
        self.turns.hand_over()
        return wait()


def _in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = parts
    sums = torch.promote_types(first.dtype, torch.float32) if first.is_floating_point() else first.dtype
    total = first.to(sums, copy=True)
    for other in others:
        total += other
    return total.to(first.dtype)


def sum_forward(y: torch.Tensor, devices: Devices) -> torch.Tensor:
    """The sum of the devices' parts; its gradient is that of every part."""
    whole: torch.Tensor = _SumForward.apply(y, devices)  # type: ignore[no-untyped-call]
    return whole


def sum_backward(x: torch.Tensor, devices: Devices) -> torch.Tensor:
    """X itself; in backward, the devices' parts of its gradient are added up."""
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


class OtherPassFailedError(Exception):
    """Raised in a pass when the other pass has failed."""


class Turns:
    def __init__(self, routing: Routing) -> None:
        self.pass_number = 0
        self._routing = routing
        self._changed = threading.Condition()
        self._is_one_over = self._has_one_failed = False

    def hand_over(self) -> None:
        """Lets the other pass run until it hands over too; does nothing once that pass has ended."""
        if self._is_one_over:
            return
        own, put_back = self.pass_number, self._routing.kept()
        self._give_to(1 - own)
        self.await_turn(own)
        put_back()

    def await_turn(self, number: int) -> None:
        """Waits for the turn of a pass; OtherPassFailedError if the other pass has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.pass_number == number)
        if self._has_one_failed:
            raise OtherPassFailedError("the pass beside this one has failed")

    def end(self, *, has_failed: bool) -> None:
        self._is_one_over, self._has_one_failed = True, has_failed or self._has_one_failed
        self._give_to(1 - self.pass_number)

    def _give_to(self, number: int) -> None:
        with self._changed:
            self.pass_number = number
            self._changed.notify_all()


class SideBySide:
    """Runs two passes at a time on one of several devices that share every layer; all devices run the same two."""

    def __init__(self, devices: Devices, routing: Routing, device: torch.device) -> None:
        self._devices, self._routing, self._device = devices, routing, device
        # It stays: threads of torch that belong to a thread are started with it. As many as here: products may depend
        # on how many there are.
        self._thread = ThreadPoolExecutor(1, "weft-second-pass", _join, (torch.get_num_threads(), device))

    def run(self, passes: Sequence[Callable[[], None]]) -> None:
        """Runs two passes to their end; raises the error of one of them once both have ended."""
        first, second = passes
        turns = self._devices.turns = Turns(self._routing)
        beside = self._thread.submit(_run_there, as_here(self._device), turns, second)
        try:
            _run(turns, 0, first)
        except OtherPassFailedError:
            beside.result()
            raise
        finally:
            beside.exception()
            self._devices.turns = None
        beside.result()


def _join(num_threads: int, device: torch.device) -> None:
    torch.set_num_threads(num_threads)
    join_thread(device)


def _run_there(device: AbstractContextManager[object], turns: Turns, run: Callable[[], None]) -> None:
    with device:
        _run(turns, 1, run)


def _run(turns: Turns, number: int, run: Callable[[], None]) -> None:
    turns.await_turn(number)
    try:
        run()
    except BaseException:
        turns.end(has_failed=True)
        raise
    turns.end(has_failed=False)


Side = Literal["outputs", "inputs"]
"""The dimension by which linears are divided over devices."""


@dataclass(frozen=True)
class SiteShare:
    """The outputs and inputs of a site that are on this device."""

    outputs: slice
    inputs: slice
    devices: Devices | None = None
    """The devices that hold the other parts; None: all devices do the same here."""
    has_all_inputs: bool = True

    @classmethod
    def whole(cls, num_out: int, num_in: int) -> SiteShare:
        return cls(slice(0, num_out), slice(0, num_in))

    @classmethod
    def part(cls, num_out: int, num_in: int, side: Side, devices: Devices) -> SiteShare:
        num_all = num_out if side == "outputs" else num_in
        assert num_all % devices.count == 0, "checked before anything was loaded"
        size = num_all // devices.count
        own = slice(devices.index * size, (devices.index + 1) * size)
        if side == "outputs":
            return cls(own, slice(0, num_in), devices)
        return cls(slice(0, num_out), own, devices, has_all_inputs=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs.stop - self.outputs.start, self.inputs.stop - self.inputs.start

    @property
    def adds_once(self) -> bool:
        """Whether this device adds what must be added once whatever the number of devices, such as a bias."""
        return self.has_all_inputs or self.devices is None or self.devices.index == 0

    def view(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The part of an adapter's tensor that belongs to this share: a view of this shape."""
        start = self.outputs.start if self.has_all_inputs else self.inputs.start
        for dim, size in enumerate(shape):
            if tensor.shape[dim] != size:
                tensor = tensor.narrow(dim, start, size)
        return tensor

    def over_inputs(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all inputs, from the sum over this device's inputs."""
        return part if self.has_all_inputs or self.devices is None else self.devices.add_up(part)

    def joined(self, weight_OD: torch.Tensor) -> torch.Tensor:
        """The frozen weight of the whole site; all devices must call this together."""
        if self.devices is None:
            return weight_OD
        return torch.cat(self.devices.gather(weight_OD.contiguous()), dim=0 if self.has_all_inputs else 1)
