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
        self.given: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """By pass and number of the exchange, what each has given."""
        self.changed = threading.Condition()
        self.is_broken = False


class ThreadDevices(Devices):
    """One of several threads that hand each other their tensors."""

    def __init__(self, index: int, meeting: Meeting) -> None:
        """`meeting` is shared by all."""
        self.index = index
        self.count = meeting.count
        self.num_met = self.num_received = 0
        self.events: list[tuple[str, int]] = []
        """What was started and waited for, each with its pass."""
        self._num_started = [0, 0]
        self._meeting = meeting

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Leaves it for the others."""
        self.num_met += 1
        self.events.append(("start", pass_number))
        exchange = pass_number, self._num_started[pass_number]
        self._num_started[pass_number] += 1
        with self._meeting.changed:
            self._meeting.given.setdefault(exchange, {})[self.index] = tensor.clone()
            # This device has received the one before, so all have started it: they have received the one before that.
            self._meeting.given.pop((pass_number, exchange[1] - 2), None)
            self._meeting.changed.notify_all()

        def wait() -> list[torch.Tensor]:
            self.events.append(("wait", pass_number))
            meeting = self._meeting
            with meeting.changed:
                is_there = meeting.changed.wait_for(
                    lambda: meeting.is_broken or len(meeting.given[exchange]) == self.count, timeout=20
                )
                if meeting.is_broken or not is_there:
                    raise threading.BrokenBarrierError("a device is gone")
                found = [part for _, part in sorted(meeting.given[exchange].items())]
            assert all(part.shape == tensor.shape and part.dtype == tensor.dtype for part in found)
            self.num_received += (self.count - 1) * tensor.numel()
            return found

        return wait

    def start_swap(self, parts: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Takes its own row of what all leave."""
        wait = self.start(parts, pass_number)

        def own() -> list[torch.Tensor]:
            found = [whole[self.index] for whole in wait()]
            self.num_received -= (self.count - 1) ** 2 * parts.shape[1]
            return found

        return own

    def leave(self) -> None:
        """Ends the wait of all others for this one."""
        with self._meeting.changed:
            self._meeting.is_broken = True
            self._meeting.changed.notify_all()


class EchoDevices(Devices):
    """The last of several, which receives its own tensors instead of the others': for what depends on shapes alone."""

    def __init__(self, count: int) -> None:
        self.index, self.count = count - 1, count

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """All give the same."""
        return lambda: [tensor] * self.count

    def start_swap(self, parts: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """All give the same."""
        return lambda: [parts[self.index]] * self.count


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
        # The others only found no one to exchange with.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [one.result() for one in running]
