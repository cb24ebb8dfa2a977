"""The one place that asks torch which devices there are, what they can do, what they hold and in which order they work.

Everybody else asks here, so a new kind of device is taught in one file. Questions about memory have an answer
everywhere: a CPU has no account, so it holds nothing and waits for nothing. Nothing here touches a GPU at import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")
Stream = torch.cuda.Stream
Graph = torch.cuda.CUDAGraph


@dataclass(frozen=True)
class GpuKind:
    """What kernels are chosen and compiled by."""

    name: str
    """What its driver calls it."""
    capability: tuple[int, int]
    num_multiprocessors: int
    total_bytes: int


_REHEARSED: list[GpuKind] = []
"""The GPU that the meta device stands for."""


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def gpus() -> list[torch.device]:
    """All that torch sees."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if has_gpu() else []


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if has_gpu() else CPU


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU, or stands for one in a rehearsal."""
    return device.type == "cuda" or _stand_in(device) is not None


def _stand_in(device: torch.device) -> GpuKind | None:
    """The GPU that a device stands for."""
    return _REHEARSED[-1] if _REHEARSED and device.type == "meta" else None


def has_streams(device: torch.device) -> bool:
    """Whether a device works on while the host goes on; one that only stands for a GPU does no work."""
    return device.type == "cuda"


@contextmanager
def rehearsed(gpu: GpuKind) -> Iterator[None]:
    """Inside, the meta device answers as this GPU would: operations choose its kernels and compute nothing.

    For a process of its own, since answers about a device are kept.
    """
    _REHEARSED.append(gpu)
    try:
        yield
    finally:
        _REHEARSED.pop()


def gpu_kind(device: torch.device) -> GpuKind:
    """What a GPU is, for a rehearsal elsewhere."""
    return GpuKind(device_name(device), capability(device), num_multiprocessors(device), total_bytes(device))


def is_cpu(device: torch.device) -> bool:
    """Whether a device is the CPU."""
    return device.type == "cpu"


def device_name(device: torch.device) -> str:
    """What its driver calls a GPU; the kind of any other device."""
    if gpu := _stand_in(device):
        return gpu.name
    return torch.cuda.get_device_name(device) if is_gpu(device) else device.type


def capability(device: torch.device) -> tuple[int, int]:
    """The version of what a GPU can do, such as (9, 0) for Hopper."""
    if gpu := _stand_in(device):
        return gpu.capability
    return torch.cuda.get_device_capability(device)


def num_multiprocessors(device: torch.device) -> int:
    """How many blocks of threads a GPU runs at the same time."""
    if gpu := _stand_in(device):
        return gpu.num_multiprocessors
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def total_bytes(device: torch.device) -> int:
    """The memory of a GPU, whoever uses it."""
    if gpu := _stand_in(device):
        return gpu.total_bytes
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """What no process uses of a GPU's memory, and all of it, as the driver counts."""
    return torch.cuda.mem_get_info(device)


def memory_share(device: torch.device) -> float:
    """The part of a GPU's memory that this process may take."""
    return torch.cuda.get_per_process_memory_fraction(device)


def limit_memory(device: torch.device, share: float) -> None:
    """Lets this process take no more than a part of a GPU's memory."""
    torch.cuda.set_per_process_memory_fraction(share, device.index)


def allocated_bytes(device: torch.device) -> int:
    """What this process's tensors take on a device now."""
    return torch.cuda.memory_allocated(device)


def reserved_bytes(device: torch.device) -> int:
    """What this process has taken of a device for its tensors, used or not."""
    return torch.cuda.memory_reserved(device)


def peak_bytes(device: torch.device) -> int:
    """Most that tensors took since `reset_peak`; 0 where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if is_gpu(device) else 0


def peak_reserved_bytes(device: torch.device) -> int:
    """Most that was taken for tensors since `reset_peak`; 0 where nobody counts."""
    return torch.cuda.max_memory_reserved(device) if is_gpu(device) else 0


def reset_peak(device: torch.device) -> None:
    """Starts a new account of the peak."""
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Gives memory back that is reserved and not used."""
    if is_gpu(device):
        torch.cuda.empty_cache()


def synchronise(device: torch.device) -> None:
    """Waits until a device has done all that was asked of it."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def timing_event(device: torch.device) -> torch.cuda.Event | None:
    """A mark behind all that a GPU has been asked for, with the time it gets there; None for devices without."""
    if not has_streams(device):
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(current_stream(device))
    return event


def current_stream(device: torch.device) -> Stream:
    """The order of work in which a GPU does what is launched now."""
    return torch.cuda.current_stream(device)


def on_stream(stream: Stream) -> Any:
    """A context in which launches go to a stream."""
    return torch.cuda.stream(stream)


def join_thread(device: torch.device) -> None:
    """Lets the thread that asks launch on a device, also what goes to the driver past torch."""
    if has_streams(device):
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)


def as_here(device: torch.device) -> AbstractContextManager[Any]:
    """A context for another thread, in which launches go where they go in this one."""
    return on_stream(current_stream(device)) if has_streams(device) else nullcontext()


@contextmanager
def beside(device: torch.device, stream: Stream) -> Iterator[None]:
    """Launches go to a stream, after all that was asked of the device before and before all that follows."""
    main = current_stream(device)
    stream.wait_stream(main)
    with on_stream(stream):
        yield
    main.wait_stream(stream)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """A mark behind all that was launched to the current stream, for other streams; None for devices without."""
    return current_stream(device).record_event() if has_streams(device) else None


def wait_for(tensor: torch.Tensor, ready: torch.cuda.Event | None) -> None:
    """What is launched to the current stream from now on finds a tensor that another stream had made by a mark."""
    if ready is not None:
        stream = current_stream(tensor.device)
        stream.wait_event(ready)
        # Its memory is not given to others of its own stream before this one is done with it.
        tensor.record_stream(stream)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room in the machine's memory, to and from which a device copies while the host goes on."""
    return torch.empty(*shape, dtype=dtype, pin_memory=has_streams(device))


def graph_pool() -> Any:
    """Memory that captured graphs share."""
    return torch.cuda.graph_pool_handle()


@contextmanager
def record(*, pool: Any = None, stream: Stream | None = None) -> Iterator[Graph]:
    """What is launched inside is not run but recorded, to be replayed as one."""
    graph = Graph()
    # Other threads wait for what goes to other processes meanwhile, which the default would take for a mistake.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph
