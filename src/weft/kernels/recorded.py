"""Kernels compiled ahead of their first launch, in processes that have no GPU of their own.

`recorded_launches` runs operations on the meta device, which stands for a GPU (`device.rehearsed`). Nothing is
computed, and Triton hands every launch to a hook with all that decides its binary, in words that `JITFunction.preload`
takes.
`compile_launch` then does what the first launch would do, up to the point where a GPU is needed: the binary goes to
Triton's cache on disk under the very key that a process with the GPU looks for. For a process that launches nothing
itself: it has no driver but the one set here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.kernels.device import GpuKind, rehearsed


@dataclass(frozen=True)
class RecordedLaunch:
    """A kernel as some launch needs it."""

    kernel: Any
    """A `triton.JITFunction`."""
    specialization: str
    """Types, constants, alignments and options, as Triton writes them down."""


class RehearsalDriver:
    """What Triton asks a driver before it compiles, answered for a GPU that is not here."""

    def __init__(self, gpu: GpuKind) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = gpu.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> Any:
        """What binaries are made for."""
        return self._target

    def get_current_device(self) -> int:
        """The first, as there is no other."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one; nothing is launched."""
        return 0


def recorded_launches(gpu: GpuKind, run: Callable[[], None]) -> list[RecordedLaunch]:
    """What `run` would launch on a GPU, each once, in the order of their first launches."""
    from triton import knobs
    from triton.runtime.driver import driver

    driver.set_active(RehearsalDriver(gpu))
    found: dict[RecordedLaunch, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[RecordedLaunch(fn.jit_function, compile["specialization_data"])] = None
        return True  # there is nothing to compile or to launch now

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with rehearsed(gpu):
            run()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found)


def compile_launch(launch: RecordedLaunch) -> None:
    """Leaves in Triton's cache what the first such launch looks for there."""
    compiled = launch.kernel.preload(launch.specialization)
    with suppress(Exception):  # there is one only in some versions, and a launch makes what it does not find
        _build_launcher(compiled)


def build_driver() -> None:
    """Leaves in Triton's cache the C module through which it talks to a GPU; the GPU is not asked."""
    with suppress(Exception):  # as above
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def _build_launcher(compiled: Any) -> None:
    """The C module that launches kernels of these types; Triton up to 3.6 compiles one for each."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)
