"""Triton where it is installed; without it every operation runs its reference implementation in plain torch.

Kernel files write `from weft.kernels.launch import jit, runs_triton, tl` and decorate with `@jit`. Nothing here touches
a GPU at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from weft.kernels.device import Stream, current_stream, has_streams, is_gpu, on_stream

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine that only runs reference implementations
    triton = None
    tl = None

__all__ = ["cdiv", "has_triton", "jit", "lanes", "next_power_of_2", "runs_triton", "tl"]

Item = TypeVar("Item")


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


def cdiv(numerator: int, denominator: int) -> int:
    """Blocks needed to cover `numerator`."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def lanes(items: Sequence[Item], device: torch.device) -> Iterator[Item]:
    """Yields the items; on a GPU the launches of each round run in parallel to those of other rounds, and finish before
    what follows the loop.

    For launches that do not touch each other's results: one that has few rows cannot fill a GPU by itself.
    """
    if not has_streams(device) or len(items) == 1:
        yield from items
        return
    main = current_stream(device)
    begin = main.record_event()
    streams = _side_streams(device, len(items) - 1)
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
