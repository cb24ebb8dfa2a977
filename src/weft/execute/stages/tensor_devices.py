"""Processes that share every layer of a stage, as devices of torch.distributed.

Each of them runs the program of the stage on its own part of the layers; what enters a stage and leaves it is whole on
all of them, so each has a neighbour of its own in the next stage. The coordinator asks all, and hears the first.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from weft.adapters.devices import Devices


class TorchDevices(Devices):
    """One of them, by groups of torch.distributed; gloo or NCCL."""

    def __init__(self, index: int, groups: Sequence[dist.ProcessGroup]) -> None:
        """`groups`: one for each of two passes that may run side by side."""
        self.index = index
        self.count = groups[0].size()
        self.groups = groups

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Starts to send it to all, and to receive theirs."""
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        work = dist.all_gather(found, tensor, group=self.groups[pass_number], async_op=True)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return found

        return wait


def join_devices(
    device: int, num_devices: int, count: int, longest_wait: datetime.timedelta
) -> list[dist.ProcessGroup]:
    """Two groups of the processes that share a stage; all processes of all stages ask at once."""
    ranks = [[stage * count + other for other in range(count)] for stage in range(num_devices)]
    teams: list[list[dist.ProcessGroup]] = [
        [dist.new_group(own, timeout=longest_wait) for _ in range(2)] for own in ranks
    ]
    return teams[device]
