"""Where the slices of a layer come from that other devices hold: from them, or from this machine's own memory."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from weft.kernels.device import CPU, Stream, current_stream, has_streams, host_memory, on_stream


class PendingGather(Protocol):
    """A layer on its way."""

    def wait(self) -> object:
        """Until it is here; a GPU goes on with other work until then, and whoever asks does not wait for it."""
        ...


class Peers(Protocol):
    """All devices that share the frozen weights, seen from one of them."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def can_be_recorded(self) -> bool:
        """Whether gathering may be part of a captured graph."""
        ...

    def keep(self, layer: int, whole: torch.Tensor) -> torch.Tensor:
        """What this device keeps of a layer's bytes, which are let go of then."""
        ...

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        """Starts to put a layer together; all devices have to ask for the same layers in the same order."""
        ...

    def most(self, number: int) -> int:
        """The largest number that any device gives; all have to ask."""
        ...


class TorchPeers:
    """Devices of a group of torch.distributed, of which each has its own process: gloo on CPUs, or NCCL."""

    can_be_recorded = False
    """The first run of a graph is one of its own, which the others do not join. So kernels are launched one by one."""

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        """`index`: which of the `count` this one is. They need not have found each other before `gather`."""
        self.index, self.count = index, count
        self.group: dist.ProcessGroup | None = None
        """None: the one of all processes."""
        self._device = device

    def keep(self, layer: int, whole: torch.Tensor) -> torch.Tensor:
        """One slice."""
        return whole.chunk(self.count)[self.index].clone()

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        """All slices, one behind the other."""
        work: PendingGather | None = dist.all_gather_into_tensor(into, own, group=self.group, async_op=True)
        assert work is not None, "this process belongs to the group"
        return work

    def most(self, number: int) -> int:
        """The largest of all processes' numbers."""
        found = torch.tensor([number], device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)


class TorchHostPeers(TorchPeers):
    """The same where gloo has to do for GPUs: what it gathers is in the machine's memory and is copied from there."""

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        """`device`: the GPU of this process."""
        super().__init__(index, count, CPU)
        self._gpu = device
        self._slices: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, whole: torch.Tensor) -> torch.Tensor:
        """One slice, of which there is a copy in the machine's memory."""
        own = super().keep(layer, whole)
        self._slices[layer] = own.cpu()
        return own

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        """Brings all slices to the machine's memory."""
        host = host_memory(into.shape, into.dtype, self._gpu)
        return _FromHost(super().gather(layer, self._slices[layer], host), host, into)


class _FromHost:
    """A layer that comes to the machine's memory."""

    def __init__(self, work: PendingGather, host: torch.Tensor, into: torch.Tensor) -> None:
        self._work, self._host, self._into = work, host, into

    def wait(self) -> None:
        """Until it is there; what is asked of the GPU from now on waits for its copy."""
        self._work.wait()
        self._into.copy_(self._host, non_blocking=True)


class HostPeers:
    """Stands in for other devices: their slices lie in this machine's own memory, pinned where there is a GPU.

    For one GPU, to measure how much of gathering is hidden, and for tests.
    """

    can_be_recorded = True

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        """`index`: which of the `count` the one device here is."""
        self.index, self.count = index, count
        self._device = device
        self._stream = Stream(device) if has_streams(device) else None
        self._slices: dict[int, list[torch.Tensor]] = {}

    def keep(self, layer: int, whole: torch.Tensor) -> torch.Tensor:
        """One slice; the others go to the machine's memory."""
        slices = list(whole.chunk(self.count))
        own = slices[self.index].clone()
        host = [one.cpu().clone() for one in slices]
        self._slices[layer] = host if self._stream is None else [one.pin_memory() for one in host]
        return own

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        """Copies the others' slices, on a GPU beside whatever else it does."""
        if self._stream is None:
            self._copy(layer, own, into)
            return _Copied(None)
        # Whoever read what is overwritten has been asked to do so before.
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            self._copy(layer, own, into)
        return _Copied(self._stream)

    def most(self, number: int) -> int:
        """That of the one device there is."""
        return number

    def _copy(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> None:
        slices = self._slices[layer]
        for place, target in enumerate(into.chunk(self.count)):
            target.copy_(own if place == self.index else slices[place], non_blocking=True)


class _Copied:
    """A copy that a stream makes, or that has been made."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def wait(self) -> None:
        """Lets what is asked of the device from now on wait for it."""
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)
