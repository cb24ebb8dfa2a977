"""Devices that are threads of this process, for models whose layers are divided."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from weft.adapters.devices import Devices

T = TypeVar("T")


class ThreadDevices(Devices):
    """One of several threads that hand each other their tensors."""

    def __init__(self, index: int, parts: list[torch.Tensor | None], meeting: threading.Barrier) -> None:
        """`parts` and `meeting` are shared by all."""
        self.index = index
        self.count = len(parts)
        self.num_met = 0
        self._parts = parts
        self._meeting = meeting

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Waits for the others."""
        self.num_met += 1
        self._parts[self.index] = tensor.clone()
        self._meeting.wait(20)
        found = [part for part in self._parts if part is not None]
        self._meeting.wait(20)
        assert all(part.shape == tensor.shape and part.dtype == tensor.dtype for part in found)
        return found

    def leave(self) -> None:
        """Lets nobody wait for this one any longer."""
        self._meeting.abort()


def thread_devices(count: int) -> list[ThreadDevices]:
    """So many that belong together."""
    parts: list[torch.Tensor | None] = [None] * count
    meeting = threading.Barrier(count)
    return [ThreadDevices(index, parts, meeting) for index in range(count)]


def on_devices(count: int, run: Callable[[ThreadDevices], T]) -> list[T]:
    """What each of so many devices finds, in their order; raises what one raised."""

    def guarded(devices: ThreadDevices) -> T:
        try:
            return run(devices)
        except BaseException:
            devices.leave()
            raise

    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(guarded, devices) for devices in thread_devices(count)]
        errors = [error for one in running if (error := one.exception()) is not None]
        # The others only found nobody to meet.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [one.result() for one in running]
