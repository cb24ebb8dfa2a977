"""When a device gets somewhere in its work: the time there, numbers sent there, and numbers brought back from there.

A GPU works on while the host goes on, so all of these are asked for in advance. What is waited for is waited for later,
and not with it what was started in between.
"""

from __future__ import annotations

import time

import torch


class Moment:
    """The time when a device has done all that was asked of it so far; on a CPU that is now."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._now_s = time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Between two moments of one device; waits for this one."""
        if self._event is None or earlier._event is None:
            return self._now_s - earlier._now_s
        self.wait()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, once that has done what was asked of it before; the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Arrival:
    """The numbers of a tensor as they are at this moment of its device, on their way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self.moment = Moment(tensor.device)

    def get(self) -> torch.Tensor:
        """The numbers on the host; waits for them."""
        self.moment.wait()
        return self._host
