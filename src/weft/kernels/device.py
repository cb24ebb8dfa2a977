"""The one module that reads from torch which devices there are, what they can do, what they hold, in which order they
work, and how their failures look.

Everything else goes through it, so support for a new kind of device is written in one file. Functions about memory work
for every device: for a CPU, where nothing is counted, they return 0 and do not wait. Nothing here touches a GPU at
import.
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
    name: str
    """Name given by the driver."""
    capability: tuple[int, int]
    num_multiprocessors: int
    total_bytes: int


_STAND_IN: list[GpuKind] = []
"""The GPU that the meta device stands for."""


def has_gpu() -> bool:
    return torch.cuda.is_available()


def gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if has_gpu() else []


def default_device() -> torch.device:
    return torch.device("cuda", 0) if has_gpu() else CPU


def is_gpu(device: torch.device) -> bool:
    """True if a device is a GPU or stands for one (`as_gpu`)."""
    return device.type == "cuda" or _stand_in(device) is not None


def _stand_in(device: torch.device) -> GpuKind | None:
    return _STAND_IN[-1] if _STAND_IN and device.type == "meta" else None


def has_streams(device: torch.device) -> bool:
    """True if a device works on while the host goes on; a stand-in for a GPU does no work."""
    return device.type == "cuda"


@contextmanager
def as_gpu(gpu: GpuKind) -> Iterator[None]:
    """Makes the meta device stand for this GPU: operations choose its kernels and compute nothing. Use it in a separate
    process, since answers about a device are cached."""
    _STAND_IN.append(gpu)
    try:
        yield
    finally:
        _STAND_IN.pop()


def gpu_kind(device: torch.device) -> GpuKind:
    return GpuKind(device_name(device), capability(device), num_multiprocessors(device), total_bytes(device))


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def device_name(device: torch.device) -> str:
    """The driver's name of a GPU; the kind of any other device."""
    if gpu := _stand_in(device):
        return gpu.name
    return torch.cuda.get_device_name(device) if is_gpu(device) else device.type


def capability(device: torch.device) -> tuple[int, int]:
    """The version of what a GPU can do, such as (9, 0) for Hopper."""
    if gpu := _stand_in(device):
        return gpu.capability
    return torch.cuda.get_device_capability(device)


def num_multiprocessors(device: torch.device) -> int:
    if gpu := _stand_in(device):
        return gpu.num_multiprocessors
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def total_bytes(device: torch.device) -> int:
    if gpu := _stand_in(device):
        return gpu.total_bytes
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Free and total memory of a GPU, counted by the driver over all processes."""
    return torch.cuda.mem_get_info(device)


def memory_share(device: torch.device) -> float:
    return torch.cuda.get_per_process_memory_fraction(device)


def limit_memory(device: torch.device, share: float) -> None:
    torch.cuda.set_per_process_memory_fraction(share, device.index)


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)


def reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device)


def peak_bytes(device: torch.device) -> int:
    """Most bytes of tensors since `reset_peak`; 0 where it is not counted."""
    return torch.cuda.max_memory_allocated(device) if is_gpu(device) else 0


def peak_reserved_bytes(device: torch.device) -> int:
    """Most bytes reserved since `reset_peak`; 0 where it is not counted."""
    return torch.cuda.max_memory_reserved(device) if is_gpu(device) else 0


def reset_peak(device: torch.device) -> None:
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    if is_gpu(device):
        torch.cuda.empty_cache()


def synchronise(device: torch.device) -> None:
    if is_gpu(device):
        torch.cuda.synchronize(device)


def timing_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after all work launched so far, with a time; None for devices without streams."""
    if not has_streams(device):
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(current_stream(device))
    return event


def current_stream(device: torch.device) -> Stream:
    return torch.cuda.current_stream(device)


def on_stream(stream: Stream) -> Any:
    return torch.cuda.stream(stream)


def join_thread(device: torch.device) -> None:
    """Lets the calling thread launch on a device, including driver calls outside torch."""
    if has_streams(device):
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)


def as_here(device: torch.device) -> AbstractContextManager[Any]:
    """A context for another thread, in which launches go to this thread's device and stream."""
    return on_stream(current_stream(device)) if has_streams(device) else nullcontext()


@contextmanager
def beside(device: torch.device, stream: Stream) -> Iterator[None]:
    """Launches go to a stream, after all earlier work of the device and before all later work."""
    main = current_stream(device)
    stream.wait_stream(main)
    with on_stream(stream):
        yield
    main.wait_stream(stream)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that was launched to the current stream, for others; None without streams."""
    return current_stream(device).record_event() if has_streams(device) else None


def wait_for(tensor: torch.Tensor, ready: torch.cuda.Event | None) -> None:
    """Makes the current stream wait for a tensor that another stream had finished at an event."""
    if ready is not None:
        stream = current_stream(tensor.device)
        stream.wait_event(ready)
        # Its memory is not given to others of its stream before this one is done with it.
        tensor.record_stream(stream)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Pinned memory of the host, which a device copies to and from while the host goes on."""
    return torch.empty(*shape, dtype=dtype, pin_memory=has_streams(device))


def graph_pool() -> Any:
    return torch.cuda.graph_pool_handle()


@contextmanager
def record(*, pool: Any = None, stream: Stream | None = None) -> Iterator[Graph]:
    """Records the launches inside it instead of running them, to be replayed as one graph."""
    graph = Graph()
    # Other threads wait for what goes to other processes meanwhile, which the default would take for a mistake.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph


_WORDS = ("error: out of memory", "error [cuda]: out of memory", "status_alloc_failed")
"""Of the CUDA runtime and driver (graphs, pinned memory), of Triton as it loads a kernel, of cuBLAS and cuDNN."""
_FAULTS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_")
"""What a failed GPU is called by torch, Triton, cuBLAS and cuDNN."""


def is_device_fault(error: RuntimeError) -> bool:
    """True if an error means that the GPU itself has failed: all later calls on it fail, too."""
    return isinstance(error, torch.AcceleratorError) or any(word in str(error) for word in _FAULTS)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error, or one that it hides, means that memory ran out: a failed capture only names the capture."""
    return any(_is_memory_message(cause) for cause in (error, error.__context__))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises torch.OutOfMemoryError for any error inside that means that memory ran out."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def _is_memory_message(error: BaseException | None) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
