"""Processes that share every layer of a stage, as devices of torch.distributed.

Each of them runs the program of the stage on its own part of the layers; what enters a stage and leaves it is whole on
all of them, so each has a neighbour of its own in the next stage. The coordinator asks all, and hears the first.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from weft.adapters.devices import Devices


class TorchDevices(Devices):
    """One of them, by a group of torch.distributed; gloo or NCCL."""

    def __init__(self, index: int, group: dist.ProcessGroup) -> None:
        self.index = index
        self.count = group.size()
        self.group = group

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Waits for what all give."""
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(found, tensor, group=self.group)
        return found


def join_devices(device: int, num_devices: int, count: int, longest_wait: datetime.timedelta) -> dist.ProcessGroup:
    """The group of the processes that share a stage; all processes of all stages ask at once."""
    ranks = [[stage * count + other for other in range(count)] for stage in range(num_devices)]
    teams: list[dist.ProcessGroup] = [dist.new_group(own, timeout=longest_wait) for own in ranks]
    return teams[device]
