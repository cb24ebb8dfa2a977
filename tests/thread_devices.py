"""Devices that are threads of this process, for models whose layers are divided."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from weft.adapters.devices import Devices

T = TypeVar("T")


class Meeting:
    """Where threads leave their tensors for each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.told: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """By pass and number of the exchange, what each has given."""
        self.changed = threading.Condition()
        self.is_broken = False


class ThreadDevices(Devices):
    """One of several threads that hand each other their tensors."""

    def __init__(self, index: int, meeting: Meeting) -> None:
        """`meeting` is shared by all."""
        self.index = index
        self.count = meeting.count
        self.num_met = 0
        self.events: list[tuple[str, int]] = []
        """What was started and waited for, each with its pass."""
        self._num_started = [0, 0]
        self._meeting = meeting

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Leaves it for the others."""
        self.num_met += 1
        self.events.append(("start", pass_number))
        place = pass_number, self._num_started[pass_number]
        self._num_started[pass_number] += 1
        with self._meeting.changed:
            self._meeting.told.setdefault(place, {})[self.index] = tensor.clone()
            # This device has heard the one before, which all have started: they have heard the one before that.
            self._meeting.told.pop((pass_number, place[1] - 2), None)
            self._meeting.changed.notify_all()

        def wait() -> list[torch.Tensor]:
            self.events.append(("wait", pass_number))
            meeting = self._meeting
            with meeting.changed:
                is_there = meeting.changed.wait_for(
                    lambda: meeting.is_broken or len(meeting.told[place]) == self.count, timeout=20
                )
                if meeting.is_broken or not is_there:
                    raise threading.BrokenBarrierError("a device is gone")
                found = [part for _, part in sorted(meeting.told[place].items())]
            assert all(part.shape == tensor.shape and part.dtype == tensor.dtype for part in found)
            return found

        return wait

    def leave(self) -> None:
        """Lets nobody wait for this one any longer."""
        with self._meeting.changed:
            self._meeting.is_broken = True
            self._meeting.changed.notify_all()


class EchoDevices(Devices):
    """The last of several, which hears itself in the place of the others: for what depends on shapes alone."""

    def __init__(self, count: int) -> None:
        self.index, self.count = count - 1, count

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """All give the same."""
        return lambda: [tensor] * self.count


def thread_devices(count: int) -> list[ThreadDevices]:
    """So many that belong together."""
    meeting = Meeting(count)
    return [ThreadDevices(index, meeting) for index in range(count)]


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
