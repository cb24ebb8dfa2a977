"""Sends tensors between the processes of stages by torch.distributed, and assigns GPUs to processes.

Messages of one channel between two stages arrive in the order in which they were sent; channels keep activations,
gradients and messages about a job's step apart. On GPUs no host waits: a stage computes on its own stream while tensors
cross.

GPUs that NCCL does not serve (two processes on one GPU, or a torch without it) use gloo, which sends from the machine's
memory. A tensor is copied there on a separate stream, and a thread sends it once it has arrived.

With `tensor:N`, N processes share every layer of a stage (`TorchDevices`). Each runs the program of the stage on its
own part of the layers; what enters and leaves a stage is whole on all of them, so each has a neighbour in the next
stage, or several where that has more. With gloo the host waits for their sums, so no graph captures them.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft.adapters.devices import Devices
from weft.errors import ConfigError
from weft.kernels.device import CPU, Stream, has_streams, host_memory, is_cpu, mark, on_stream, wait_for
from weft.model.resolve import ResolvedModel
from weft.processes import VISIBLE, check_cpu_processes, choose_gpus, visible_gpus


class Channel(IntEnum):
    ACTIVATION = 0
    GRADIENT = 1
    PART = 2
    """Part of a job's gradient to its root stage: the first one that has a part."""
    NORM = 3
    CHOICE = 4
    """Next tokens of answers from the last stage to all before it."""


@dataclass(frozen=True, order=True)
class Route:
    channel: Channel
    source: int
    target: int

    @property
    def direction(self) -> tuple[Channel, bool]:
        return self.channel, self.target > self.source


DIRECTIONS = (
    (Channel.ACTIVATION, True),
    (Channel.GRADIENT, False),
    (Channel.PART, False),
    (Channel.NORM, True),
    (Channel.NORM, False),
    (Channel.CHOICE, False),
)
"""All directions; a job's root stage need not be on the first replica, if that had no sample of it."""


@dataclass(frozen=True)
class Teams:
    """The processes of all stages, one stage after the other."""

    sizes: tuple[int, ...]
    """Number of processes that share each stage."""

    def processes(self, stage: int) -> range:
        first = sum(self.sizes[:stage])
        return range(first, first + self.sizes[stage])

    def stage_of(self, process: int) -> int:
        return next(stage for stage, _ in enumerate(self.sizes) if process in self.processes(stage))


class StageGoneError(Exception):
    """The process at the other end is gone; the coordinator notices it too."""


class Transport(Protocol):
    def open(self, routes: Collection[Route]) -> None:
        """Prepares routes; all stages open the same ones, before anything else."""
        ...

    def send(self, tensor: torch.Tensor, to_stage: int, channel: Channel) -> None: ...

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, channel: Channel
    ) -> torch.Tensor | None:
        """Returns the next tensor; None if it has not been sent yet and waiting would not help."""
        ...

    def finish(self) -> None: ...


class TorchTransport:
    """Between processes of torch.distributed: gloo on CPUs, where receiving waits, or NCCL. Every channel has a group
    for each direction, and so communicators of its own: those of NCCL do one thing after another, so that one that sent
    and received would wait for itself. What is received comes on a stream that waits for no computing."""

    def __init__(
        self, stage: int, device: torch.device, longest_wait: datetime.timedelta, teams: Teams, tensor: int = 0
    ) -> None:
        """All processes of the default group make theirs at the same time. `tensor`: its index in its team. A process
        receives from the one with its own index, or with the rest of dividing it by the other team's size."""
        self._stage = stage
        self._tensor, self._teams = tensor, teams
        self._device = device
        self._groups = {direction: dist.new_group(timeout=longest_wait) for direction in DIRECTIONS}
        self._open: set[Route] = set()
        self._leaving: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._streams = {direction: Stream(device) for direction in DIRECTIONS} if has_streams(device) else {}

    def open(self, routes: Collection[Route]) -> None:
        """Sends a number along each of its new routes, in the same order everywhere. NCCL connects two processes when
        they first send, and both wait for it: in the middle of a program each might wait for the other."""
        for route in sorted({*routes} - self._open):
            if route.source == self._stage:
                self.send(torch.zeros(1, device=self._device), route.target, route.channel)
            elif route.target == self._stage:
                # A stage that is gone is noticed when its next message is awaited.
                with suppress(StageGoneError):
                    self.receive((1,), torch.float32, route.source, route.channel)
        self._open |= {*routes}

    def send(self, tensor: torch.Tensor, to_stage: int, channel: Channel) -> None:
        """Starts to send a tensor, which is kept until it is sent; nothing is sent to a process that is gone."""
        self._leaving = [(work, kept) for work, kept in self._leaving if work is not None and not work.is_completed()]
        tensor = tensor.contiguous()
        group = self._groups[Route(channel, self._stage, to_stage).direction]
        for process in self._teams.processes(to_stage)[self._tensor :: self._teams.sizes[self._stage]]:
            with suppress(RuntimeError):
                self._leaving.append((dist.isend(tensor, process, group=group), tensor))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, channel: Channel) -> torch.Tensor:
        """Waits for the next tensor; on a GPU only later launches wait. StageGoneError if the sender is gone."""
        direction, senders = Route(channel, from_stage, self._stage).direction, self._teams.processes(from_stage)
        with on_stream(self._streams[direction]) if self._streams else nullcontext():
            tensor = self._room(shape, dtype)
            try:
                dist.recv(tensor, senders[self._tensor % len(senders)], group=self._groups[direction])
            except RuntimeError as error:
                raise StageGoneError(str(error)) from None
            ready = mark(self._device)
        wait_for(tensor, ready)
        return tensor

    def finish(self) -> None:
        for work, _ in self._leaving:
            if work is not None:
                with suppress(RuntimeError):
                    work.wait()
        self._leaving.clear()

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self._device)


class HostTransport(TorchTransport):
    def __init__(
        self, stage: int, device: torch.device, longest_wait: datetime.timedelta, teams: Teams, tensor: int = 0
    ) -> None:
        super().__init__(stage, CPU, longest_wait, teams, tensor)
        self._gpu = device
        self._out, self._in = (Stream(device) if has_streams(device) else None for _ in range(2))
        # A stage's results are ready in the order of its stream, so one thread can wait for them.
        self._thread = ThreadPoolExecutor(1, "weft-send")
        self._handed: list[Future[None]] = []

    def send(self, tensor: torch.Tensor, to_stage: int, channel: Channel) -> None:
        ready = mark(tensor.device)
        with nullcontext() if self._out is None else on_stream(self._out):
            wait_for(tensor, ready)
            host = host_memory(tensor.shape, tensor.dtype, self._gpu)
            host.copy_(tensor, non_blocking=True)
            copied = mark(self._gpu)
        self._handed = [handed for handed in self._handed if not handed.done()]
        self._handed.append(self._thread.submit(self._hand_over, host, copied, to_stage, channel))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, channel: Channel) -> torch.Tensor:
        """Waits until the tensor is in the machine's memory; later launches wait for its copy to the GPU."""
        host = super().receive(shape, dtype, from_stage, channel)
        with nullcontext() if self._in is None else on_stream(self._in):
            tensor = host.to(self._gpu, non_blocking=True)
            ready = mark(self._gpu)
        wait_for(tensor, ready)
        return tensor

    def finish(self) -> None:
        for handed in self._handed:
            handed.result()
        self._handed.clear()
        super().finish()

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return host_memory(shape, dtype, self._gpu)

    def _hand_over(self, host: torch.Tensor, copied: Any, to_stage: int, channel: Channel) -> None:
        if copied is not None:
            copied.synchronize()
        super().send(host, to_stage, channel)


WHERE = "--devices"
LOOPBACKS = ("lo", "lo0")
LOCALHOST = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Request for the address of an interface, on Linux."""


def find_gpus(model: ResolvedModel, num_devices: int, chosen: str | None) -> tuple[str, ...]:
    """GPU of each process by CUDA's name; empty on a CPU. ConfigError if there are too few. `chosen`: numbers of GPUs,
    one for each process; naming one twice puts two processes on it, for tests."""
    if model.is_cpu:
        if chosen is not None:
            raise ConfigError("are for GPUs, and this run is on a CPU; leave them out.", where=WHERE)
        check_cpu_processes(num_devices, "--layout")
        return ()
    gpus = choose_gpus(chosen, visible_gpus())
    if chosen is not None and len(gpus) != num_devices:
        found = f"got {chosen}, which names {len(gpus)}; the layout has {num_devices} devices, so name one for each."
        raise ConfigError(found, where=WHERE)
    if num_devices > len(gpus):
        there = "there is 1 GPU" if len(gpus) == 1 else f"there are {len(gpus)} GPUs"
        found = f"takes {num_devices} GPUs, and {there}; use a layout of at most {len(gpus)}"
        raise ConfigError(f"{found}, or to try it out put several on one with {WHERE}.", where="--layout")
    return tuple(gpus[:num_devices])


def choose_backend(gpus: Sequence[str]) -> str:
    """NCCL where every process has its own GPU; it refuses two on one. Else gloo."""
    has_own = len({*gpus}) == len(gpus) > 0
    return "nccl" if has_own and dist.is_nccl_available() else "gloo"


def process_variables(gpu: str | None) -> dict[str, str]:
    """Environment of a process: it sees its own GPU alone, and gloo uses the loopback interface. Otherwise gloo would
    resolve the machine's name, which takes long without a network."""
    loopbacks = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    own = {} if gpu is None else {VISIBLE: gpu}
    return {**({"GLOO_SOCKET_IFNAME": loopbacks[0]} if loopbacks else {}), **os.environ, **own}


def address_of_peer(connection: Connection) -> str | None:
    """Address of the machine at the other end of a network connection; None for a connection within this machine."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        return link.getpeername()[0] if link.family in (socket.AF_INET, socket.AF_INET6) else None


def network_variables(connection: Connection) -> dict[str, str]:
    """Environment variables by which gloo and NCCL use the network interface of this connection. Without them gloo
    looks up the machine's own name, which may be an address that other machines cannot reach."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        own = link.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(link, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return {key: os.environ.get(key, name) for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {}


def goes_through_host(device: torch.device, backend: str) -> bool:
    return backend == "gloo" and not is_cpu(device)


class TorchDevices(Devices):
    """One of the processes that share every layer, with groups of torch.distributed: gloo on CPUs, or NCCL."""

    def __init__(self, index: int, count: int, *, can_be_recorded: bool = False) -> None:
        """`can_be_recorded`: the groups are NCCL's, whose exchanges are launched as kernels are."""
        self.index = index
        self.count = count
        self.can_be_recorded = can_be_recorded
        self.groups: Sequence[dist.ProcessGroup] = ()

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        """Starts to exchange a tensor with all; returns a function that waits."""
        tensor = tensor.contiguous()
        found = [self._room(tensor) for _ in range(self.count)]
        work = dist.all_gather(found, tensor, group=self.groups[pass_number], async_op=True)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return found

        return wait

    def start_swap(self, parts: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        parts = parts.contiguous()
        found = self._room(parts)
        work = dist.all_to_all_single(found, parts, group=self.groups[pass_number], async_op=True)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return list(found)

        return wait

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)


class HostDevices(TorchDevices):
    """Devices that share every layer on GPUs with groups of gloo: tensors go through pinned memory."""

    def __init__(self, index: int, count: int, gpu: torch.device) -> None:
        super().__init__(index, count)
        self._gpu = gpu

    def start(self, tensor: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        return self._on_gpu(super().start(self._on_host(tensor), pass_number))

    def start_swap(self, parts: torch.Tensor, pass_number: int) -> Callable[[], list[torch.Tensor]]:
        return self._on_gpu(super().start_swap(self._on_host(parts), pass_number))

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._room(tensor)
        host.copy_(tensor, non_blocking=True)
        copied = mark(self._gpu)
        if copied is not None:
            copied.synchronize()
        return host

    def _on_gpu(self, wait: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
        return lambda: [part.to(self._gpu, non_blocking=True) for part in wait()]

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        return host_memory(tensor.shape, tensor.dtype, self._gpu)


def tensor_devices(index: int, count: int, device: torch.device, backend: str) -> TorchDevices:
    """Returns this process as one of those that share a stage, for this backend; they are not connected yet."""
    if goes_through_host(device, backend):
        return HostDevices(index, count, device)
    return TorchDevices(index, count, can_be_recorded=backend == "nccl")


def join_devices(device: int, teams: Teams, longest_wait: datetime.timedelta) -> list[dist.ProcessGroup]:
    """Makes two groups of the processes that share a stage; all processes of all stages call this at once."""
    groups: list[list[dist.ProcessGroup]] = [
        [dist.new_group([*teams.processes(stage)], timeout=longest_wait) for _ in range(2)]
        for stage, _ in enumerate(teams.sizes)
    ]
    return groups[device]
