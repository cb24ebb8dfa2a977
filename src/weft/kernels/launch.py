"""Triton where it is installed; without it every operation runs its reference implementation in plain torch.

Kernel files write `from weft.kernels.launch import jit, runs_triton, tl` and decorate with `@jit`. Nothing here touches
a GPU at import.

Kernels can be compiled ahead of their first launch, in processes without a GPU. `recorded_launches` runs operations on
the meta device, which stands for a GPU (`device.as_gpu`). Nothing is computed, and Triton passes every launch to a hook
with all that its binary depends on, in the form that `JITFunction.preload` takes. `compile_launch` then does the same
as the first launch, up to the point where a GPU is needed: the binary goes to Triton's cache on disk under the same key
that a process with the GPU looks up. Use it in a process that launches nothing itself: its only driver is the one set
here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import torch

from weft.kernels.device import GpuKind, Stream, as_gpu, current_stream, has_streams, is_gpu, on_stream

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine that only runs reference implementations
    triton = None
    tl = None

__all__ = ["cdiv", "has_triton", "jit", "lanes", "next_power_of_2", "on_device", "runs_triton", "tl"]

Item = TypeVar("Item")
Result = TypeVar("Result")
P = ParamSpec("P")


UNSPECIALISED = ("module", "num_modules", "num_lanes")
"""Arguments that differ from layer to layer or grow with the jobs; a kernel compiled for one value serves all."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the bare function where Triton is not installed."""
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in UNSPECIALISED if name in names])


def has_triton() -> bool:
    return triton is not None


def runs_triton(tensor: torch.Tensor) -> bool:
    """True if an operation on this tensor launches its kernel; otherwise it runs its reference implementation."""
    return triton is not None and is_gpu(tensor.device)


def on_device(kernel: Callable[P, Result], reference: Callable[P, Result]) -> Callable[P, Result]:
    """The operation that launches its kernel if its first argument is on a GPU, and runs its reference otherwise."""

    def run(*args: P.args, **named: P.kwargs) -> Result:
        first: Any = args[0]
        return (kernel if runs_triton(first) else reference)(*args, **named)

    return run


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def lanes(items: Sequence[Item], device: torch.device) -> Iterator[Item]:
    """Yields the items; on a GPU the launches of each round run in parallel to those of other rounds, and finish before
    what follows the loop. For launches that do not touch each other's results: one that has few rows cannot fill a GPU
    by itself."""
    if not has_streams(device) or len(items) == 1:
        yield from items
        return
    main = current_stream(device)
    begin = main.record_event()
    # Streams come from a pool, and another part of the program may have been given the same one.
    streams = [stream for stream in _side_streams(device, len(items)) if stream != main][: len(items) - 1]
    for item, stream in zip(items[1:], streams, strict=True):
        stream.wait_event(begin)
        with on_stream(stream):
            yield item
    yield items[0]
    for stream in streams:
        main.wait_stream(stream)


@lru_cache(maxsize=64)
def _side_streams(device: torch.device, number: int) -> tuple[Stream, ...]:
    return tuple(Stream(device) for _ in range(number))


@dataclass(frozen=True)
class RecordedLaunch:
    kernel: Any
    specialization: str
    """Types, constants, alignments and options, in Triton's notation."""


class RecordingDriver:
    """The driver that Triton reads before it compiles, for a GPU that is not here."""

    def __init__(self, gpu: GpuKind) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = gpu.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one; nothing is launched."""
        return 0


def recorded_launches(gpu: GpuKind, run: Callable[[], None]) -> list[RecordedLaunch]:
    """Launches of `run` on a GPU, each once, in the order of their first launches."""
    from triton import knobs
    from triton.runtime.driver import driver

    driver.set_active(RecordingDriver(gpu))
    launches: dict[RecordedLaunch, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches[RecordedLaunch(fn.jit_function, compile["specialization_data"])] = None
        return True  # there is nothing to compile or to launch now

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with as_gpu(gpu):
            run()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(launches)


def compile_launch(launch: RecordedLaunch) -> None:
    compiled = launch.kernel.preload(launch.specialization)
    with suppress(Exception):  # there is one only in some versions, and a launch makes what it does not find
        _build_launcher(compiled)


def build_driver() -> None:
    """Compiles Triton's C module that talks to a GPU into its cache, without using the GPU."""
    with suppress(Exception):  # as above
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def _build_launcher(compiled: Any) -> None:
    """The C module that launches kernels of these types; Triton up to 3.6 compiles one for each."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)
