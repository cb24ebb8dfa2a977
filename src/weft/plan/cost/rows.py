"""How many rows frozen products run over: what the backbone does and every estimate of it must agree on."""

from __future__ import annotations

from weft.spec.run import Capacity

CPU_ROW_TILE = 128
"""Rows per frozen product on a CPU: smaller blocks are slower, larger ones leave more rows empty in a small microbatch;
`python -m benchmarks cpu-blocks` measures what blocks cost."""
GPU_ROW_TILE = 2048
"""At most so many on a GPU: enough to fill it, few enough that half a microbatch costs half."""
WIDE = 8192
"""From this hidden size on, half as many rows fill it, and leave fewer of them empty."""
GRAIN = 64
"""Tiles on a GPU are multiples of it."""
CPU_CAPACITY = 2048
"""Tokens of a microbatch on a CPU unless a run says otherwise: products of more rows are no faster, and take memory."""
GPU_CAPACITY = 8192
"""The same on a GPU, where frozen products and launches are best at this many rows."""


def choose_capacity(asked: Capacity, device: str, longest: int = 0) -> int:
    """The tokens of a microbatch that a run asks for; `auto` depends on the device and the longest sample alone.

    `device` is `cpu` or a GPU of any name.
    """
    if asked != "auto":
        return asked
    usual = CPU_CAPACITY if device == "cpu" else GPU_CAPACITY
    return usual if longest <= usual else 1 << (longest - 1).bit_length()


def capacities(asked: Capacity, device: str, longest: int = 0) -> list[int]:
    """The same, and what may be taken instead where memory is too short for the jobs beside it: nothing for a number.

    Halves of it, down to a whole tile: with fewer rows products slow down.
    """
    found = [choose_capacity(asked, device, longest)]
    while asked == "auto" and found[-1] // 2 >= max(GPU_ROW_TILE, longest):
        found.append(found[-1] // 2)
    return found


def estimated_row_tile(device: str, capacity: int, hidden: int) -> int:
    """The row tile of the fused path on `cpu` or a GPU of any name."""
    return CPU_ROW_TILE if device == "cpu" else gpu_row_tile(capacity, hidden)


def gpu_row_tile(capacity: int, hidden: int) -> int:
    """The tile of which whole ones make up a capacity, so that a full microbatch leaves hardly a row empty."""
    most = GPU_ROW_TILE if hidden < WIDE else GPU_ROW_TILE // 2
    num_tiles = -(-capacity // most)
    return -(-capacity // (num_tiles * GRAIN)) * GRAIN
