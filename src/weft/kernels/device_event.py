"""Points in a device's work: the time when it gets there, numbers copied to it or from it, and seconds of work.

A GPU works on while the host goes on, so all of these are requested in advance. The host waits later, and only for what
was started before. Times are device events on a GPU, the host's clock elsewhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from weft.kernels.device import Stream, beside, has_streams, is_gpu, record, synchronise, timing_event


class DeviceEvent:
    """The time when a device has finished the work launched so far; on a CPU that is now."""

    def __init__(self, device: torch.device) -> None:
        self._event = timing_event(device)
        self.seen_s: float | None = time.perf_counter() if self._event is None else None
        """Time at which the host first knew that it had come, by `time.perf_counter`."""

    def wait(self) -> float:
        """Waits until it has come; returns `seen_s`."""
        if self._event is not None:
            self._event.synchronize()
        if self.seen_s is None:
            self.seen_s = time.perf_counter()
        return self.seen_s

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Seconds since an earlier event of the same device; waits for this one."""
        if self._event is None or earlier._event is None:
            return self.wait() - earlier.wait()
        self.wait()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, copied after the work launched before; the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if has_streams(device) else tensor.to(device)


class AsyncCopy:
    """Room on the host for the numbers of a tensor, filled when its device has computed them. The room is allocated at
    once: if there is no memory for it, nothing has been launched yet."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if tensor.is_cuda else tensor
        self._moment: DeviceEvent | None = None

    def begin(self) -> AsyncCopy:
        """Starts the copy, of the numbers as they are when the device gets here."""
        if self._host is not self._tensor:
            self._host.copy_(self._tensor, non_blocking=True)
        self._moment = DeviceEvent(self._tensor.device)
        return self

    @property
    def moment(self) -> DeviceEvent:
        assert self._moment is not None, "begin() has not been called"
        return self._moment

    def get(self) -> torch.Tensor:
        """The numbers on the host; waits for them."""
        self.moment.wait()
        return self._host


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in ordinary host memory; from a GPU all at once through pinned memory, which is released."""
    copies = {name: host_copy(tensor) for name, tensor in tensors.items()}
    return {name: copy.get().clone() if tensors[name].is_cuda else copy.get() for name, copy in copies.items()}


def host_copy(tensor: torch.Tensor) -> AsyncCopy:
    """A copy of a tensor on the host, as it is when the device gets here; the host waits without pinned memory."""
    if not tensor.is_cuda:
        return AsyncCopy(tensor.clone()).begin()
    try:
        return AsyncCopy(tensor).begin()
    except RuntimeError:
        return AsyncCopy(tensor.cpu()).begin()


def median_s(
    work: Callable[[], object], device: torch.device, *, warmups: int, repeats: int, in_a_row_s: float = 0.0
) -> float:
    """Median seconds of `work`; each time it is done over and over for `in_a_row_s`, as training does its steps."""
    for _ in range(warmups):
        work()
    number = max(1, math.ceil(in_a_row_s / seconds_of(work, device))) if in_a_row_s else 1
    return statistics.median(seconds_of(work, device, number) for _ in range(repeats))


def replayable(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work as a captured CUDA graph where there is one: the host's part does not count."""
    if not is_gpu(device):
        return work
    with beside(device, Stream(device)):
        work()
    with record() as graph:
        work()
    return graph.replay


def seconds_of(work: Callable[[], object], device: torch.device, number: int = 1) -> float:
    """Seconds of one work among so many that follow each other."""
    synchronise(device)
    begun = DeviceEvent(device)
    for _ in range(number):
        work()
    ended = DeviceEvent(device)
    synchronise(device)
    return ended.seconds_since(begun) / max(1, number)
