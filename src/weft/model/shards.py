"""Frozen weights of the layers spread over several devices, and gathered layer by layer ahead of use.

A layer's weights are one run of bytes, however they are stored: FP8, int8 and NF4 weights are gathered in their small
form, and no number changes on the way. `Peers` has the slices of other devices: from them, or from this machine's own
memory.

A ring is two buffers: one is worked on while the next layer is gathered into the other. A layer's weights read the
buffer of its parity for ever, so a captured graph finds the same addresses. A microbatch goes through all layers, 0 to
L - 1, and back again if anything learns from it, at once or when others have passed; its ways are the same on all
devices, whether they have samples or not, since each gives its slices to the others:
    begin(back)   the first two layers of the way are here: 0 and 1, or the last ones on the way back
    use(i)        waits for layer i, and starts to gather the next one over the previous one
    end(then)     goes the rest of the way for the others' sake: gradients need not go back to the first layer. Then
                  those come with which the next way begins, as far as they are not here
Forward and at once back that is 2 (L - 2) gathers a microbatch: at the turning point both layers are still here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from weft.adapters.frozen import FrozenWeight
from weft.kernels.device import CPU, host_memory


class PendingGather(Protocol):
    def wait(self) -> object:
        """Makes later GPU work wait for the layer; the host does not wait."""


class Peers(Protocol):
    """All devices that share the frozen weights, seen from one of them."""

    @property
    def count(self) -> int: ...

    @property
    def can_be_recorded(self) -> bool:
        """Whether gathering may be part of a captured graph."""

    def keep(self, layer: int, whole: torch.Tensor) -> torch.Tensor:
        """This device's slice of a layer's bytes; the whole is released."""

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        """Starts to gather a layer; all devices must gather the same layers in the same order."""

    def most(self, number: int) -> int:
        """The largest number of any device; all must call this."""


class TorchPeers:
    """Devices of a torch.distributed group, one process each: gloo on CPUs, or NCCL."""

    can_be_recorded = False
    """The first run of a graph is separate, which the others would not join, so kernels are launched one by one."""

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        """`index`: that of this device, of `count`. The devices need not be connected before `gather`."""
        self.index, self.count = index, count
        self.group: dist.ProcessGroup | None = None
        """The process group; None: the default one."""
        self._device = device

    def keep(self, layer: int, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.count)[self.index].clone()

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        """All slices, concatenated."""
        work: PendingGather | None = dist.all_gather_into_tensor(into, own, group=self.group, async_op=True)
        assert work is not None, "this process belongs to the group"
        return work

    def most(self, number: int) -> int:
        found = torch.tensor([number], device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)


class TorchHostPeers(TorchPeers):
    """The same with gloo for GPUs: it gathers in host memory, from which the GPU copies."""

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        super().__init__(index, count, CPU)
        self._gpu = device
        self._slices: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, whole: torch.Tensor) -> torch.Tensor:
        own = super().keep(layer, whole)
        self._slices[layer] = own.cpu()
        return own

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        host = host_memory(into.shape, into.dtype, self._gpu)
        return _FromHost(super().gather(layer, self._slices[layer], host), host, into)


class _FromHost:
    def __init__(self, work: PendingGather, host: torch.Tensor, into: torch.Tensor) -> None:
        self._work, self._host, self._into = work, host, into

    def wait(self) -> None:
        """Waits for the layer; later GPU work waits for its copy."""
        self._work.wait()
        self._into.copy_(self._host, non_blocking=True)


ALIGNMENT = 256
"""Alignment in bytes of every tensor, as in an allocation of its own, so that libraries choose the same algorithms."""


@dataclass(frozen=True, eq=False)
class LayerWeight:
    weight: FrozenWeight
    paths: tuple[str, ...]
    """The linears whose outputs it holds, in order."""
    parts: tuple[FrozenWeight, ...] = ()
    """Weights of these linears that share its storage, if several are joined."""


class FlatLayer:
    def __init__(self, weights: Sequence[LayerWeight]) -> None:
        self.weights = tuple(weights)
        self._starts: dict[tuple[int, str], int] = {}
        """Offset of every stored tensor, by the index of its weight and its name."""
        end = 0
        for index, own in enumerate(weights):
            for name, tensor in own.weight.stored.items():
                assert tensor.is_contiguous(), "a weight with a storage of its own is in one piece"
                self._starts[index, name] = end
                end += _rounded_up(tensor.numel() * tensor.element_size(), ALIGNMENT)
        self.num_bytes = end

    def padded_bytes(self, num_slices: int) -> int:
        return _rounded_up(self.num_bytes, num_slices * ALIGNMENT)

    def write(self, numbers: Sequence[FrozenWeight], into: torch.Tensor) -> None:
        """Writes tensors into a run of bytes: those of weights like this layer's, which may be empty themselves."""
        for index, (own, given) in enumerate(zip(self.weights, numbers, strict=True)):
            for name, tensor in own.weight.stored.items():
                start, found = self._starts[index, name], given.stored[name]
                assert found.shape == tensor.shape and found.dtype == tensor.dtype
                flat = found.detach().contiguous().view(-1).view(torch.uint8)
                into[start : start + len(flat)].copy_(flat)

    def lie_in(self, buffer: torch.Tensor) -> None:
        for index, own in enumerate(self.weights):
            for name, whole in own.weight.stored.items():
                start = self._starts[index, name]
                there = buffer[start : start + whole.numel() * whole.element_size()].view(whole.dtype)
                before = whole.storage_offset()
                for weight in (*own.parts, own.weight):
                    tensor = weight.stored[name]
                    first = there.storage_offset() + tensor.storage_offset() - before
                    # Autograd must not count these writes: the ring orders them.
                    view = there.as_strided(tensor.shape, tensor.stride(), first).data
                    weight.register_parameter(name, nn.Parameter(view, requires_grad=False))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


NUM_BUFFERS = 2


class LayerRing:
    def __init__(self, layers: Sequence[FlatLayer], slices: Sequence[torch.Tensor], peers: Peers) -> None:
        """`slices`: this device's slice of each layer. The weights of the layers become views of the buffers."""
        self._peers = peers
        self._slices = list(slices)
        self._sizes = [layer.padded_bytes(peers.count) for layer in layers]
        self._buffers = [
            torch.zeros(max(self._sizes[parity::NUM_BUFFERS], default=0), dtype=torch.uint8, device=slices[0].device)
            for parity in range(NUM_BUFFERS)
        ]
        self._held: list[int | None] = [None] * NUM_BUFFERS
        """The layer in each buffer, or on its way there."""
        self._arriving: list[PendingGather | None] = [None] * NUM_BUFFERS
        self._way: deque[int] = deque()
        self._is_back_next: bool | None = None
        for index, layer in enumerate(layers):
            layer.lie_in(self._buffer(index))

    @property
    def num_bytes(self) -> int:
        return sum(len(own) for own in (*self._slices, *self._buffers))

    @property
    def gathered_bytes(self) -> int:
        whole = sum(self._sizes[NUM_BUFFERS:]) + sum(self._sizes[:-NUM_BUFFERS])
        return whole - whole // self._peers.count

    @property
    def can_be_recorded(self) -> bool:
        return self._peers.can_be_recorded

    def begin(self, *, back: bool) -> None:
        assert not self._way, "one microbatch is under way at a time"
        self._way.extend(self._layers(back=back))
        self._start_first(back=back)
        for layer in self._layers(back=back)[:NUM_BUFFERS]:
            self._arrive(layer)

    def use(self, layer: int) -> None:
        assert self._way and self._way[0] == layer, f"layer {layer} is not the next of {list(self._way)}"
        self._way.popleft()
        self._arrive(layer)
        following = next((other for other in self._way if other != layer), None)
        if following is not None:
            self._start(following)

    def end(self, *, then_back: bool) -> None:
        while self._way:
            self.use(self._way[0])
        self._start_first(back=then_back if self._is_back_next is None else self._is_back_next)

    @contextmanager
    def before(self, *, back: bool) -> Iterator[None]:
        """Context of passes that a forward, or a backward, pass follows; all devices pass the same value."""
        self._is_back_next = back
        try:
            yield
        finally:
            self._is_back_next = None

    def run_empty_pass(self, *, back: bool, then_back: bool = False) -> None:
        """A pass without samples: others need this device's slices."""
        self.begin(back=back)
        self.end(then_back=then_back)

    def most(self, number: int) -> int:
        """The largest number of any device, such as its number of microbatches."""
        return self._peers.most(number)

    def holds(self, layer: int) -> bool:
        index = layer % NUM_BUFFERS
        return self._held[index] == layer and self._arriving[index] is None

    def went(self, *, back: bool) -> None:
        """Records that a captured graph has run a whole pass."""
        self._way.clear()
        for layer in self._layers(back=not back)[:NUM_BUFFERS]:
            self._held[layer % NUM_BUFFERS] = layer

    def forget(self) -> None:
        for layer in self._held:
            if layer is not None:
                self._arrive(layer)
        self._way.clear()

    def _layers(self, *, back: bool) -> range:
        layers = range(len(self._slices))
        return layers[::-1] if back else layers

    def _start_first(self, *, back: bool) -> None:
        for layer in self._layers(back=back)[:NUM_BUFFERS]:
            self._start(layer)

    def _start(self, layer: int) -> None:
        index = layer % NUM_BUFFERS
        if self._held[index] != layer:
            assert self._arriving[index] is None, "what comes is used before another takes its place"
            self._held[index] = layer
            self._arriving[index] = self._peers.gather(layer, self._slices[layer], self._buffer(layer))

    def _arrive(self, layer: int) -> None:
        index = layer % NUM_BUFFERS
        arriving, self._arriving[index] = self._arriving[index], None
        if arriving is not None:
            arriving.wait()

    def _buffer(self, layer: int) -> torch.Tensor:
        return self._buffers[layer % NUM_BUFFERS][: self._sizes[layer]]
