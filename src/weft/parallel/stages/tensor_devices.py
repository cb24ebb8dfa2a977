"""Processes that share every layer of a stage, as devices of torch.distributed.

Each of them runs the program of the stage on its own part of the layers; what enters a stage and leaves it is whole on
all of them, so each has a neighbour of its own in the next stage. The coordinator asks all, and hears the first.
GPUs that NCCL does not serve, two processes on one of them for instance, meet in the machine's memory; the host waits
for that, so no graph holds it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from weft.adapters.devices import Devices
from weft.kernels.device import host_memory, mark
from weft.parallel.stages.stage_devices import goes_through_host


class TorchDevices(Devices):
    """One of them, by groups of torch.distributed; gloo on CPUs, or NCCL."""

    def __init__(self, index: int, count: int, *, can_be_recorded: bool = False) -> None:
        """`can_be_recorded`: the groups are NCCL's, whose exchanges are launched as kernels are."""
        self.index = index
        self.count = count
        self.can_be_recorded = can_be_recorded
        self.groups: Sequence[dist.ProcessGroup] = ()
        """One for each of two passes that may run side by side; they are there once all have met."""

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Starts to send it to all, and to receive theirs."""
        tensor = tensor.contiguous()
        found = [self._room(tensor) for _ in range(self.count)]
        work = dist.all_gather(found, tensor, group=self.groups[pass_number], async_op=True)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return found

        return wait

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where what another device gives is received."""
        return torch.empty_like(tensor)


class HostDevices(TorchDevices):
    """One of them on a GPU, by groups of gloo: through pinned memory."""

    def __init__(self, index: int, count: int, gpu: torch.device) -> None:
        """`gpu`: that of this process."""
        super().__init__(index, count)
        self._gpu = gpu

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Waits until it is in the machine's memory, and starts from there."""
        host = self._room(tensor)
        host.copy_(tensor, non_blocking=True)
        copied = mark(self._gpu)
        if copied is not None:
            copied.synchronize()
        wait = super().start(host, pass_number)
        return lambda: [part.to(self._gpu, non_blocking=True) for part in wait()]

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        return host_memory(tensor.shape, tensor.dtype, self._gpu)


def tensor_devices(index: int, count: int, device: torch.device, backend: str) -> TorchDevices:
    """One of the processes that share a stage, by the backend that they talk by; they have not met yet."""
    if goes_through_host(device, backend):
        return HostDevices(index, count, device)
    return TorchDevices(index, count, can_be_recorded=backend == "nccl")


def join_devices(
    device: int, num_devices: int, count: int, longest_wait: datetime.timedelta
) -> list[dist.ProcessGroup]:
    """Two groups of the processes that share a stage; all processes of all stages ask at once."""
    ranks = [[stage * count + other for other in range(count)] for stage in range(num_devices)]
    teams: list[list[dist.ProcessGroup]] = [
        [dist.new_group(own, timeout=longest_wait) for _ in range(2)] for own in ranks
    ]
    return teams[device]
