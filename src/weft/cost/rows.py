"""How many rows frozen products run over: what the backbone does and every estimate of it must agree on."""

from __future__ import annotations

CPU_ROW_TILE = 128
"""Rows per frozen product on a CPU: smaller blocks are slower, larger ones leave more rows empty in a small microbatch;
`benchmarks/cpu_blocks.py` measures what blocks cost."""
GPU_ROW_TILE = 2048
"""At most so many on a GPU: enough to fill it, few enough that half a microbatch costs half."""
GRAIN = 64
"""Tiles on a GPU are multiples of it."""


def gpu_row_tile(capacity: int) -> int:
    """The tile of which whole ones make up a capacity, so that a full microbatch leaves hardly a row empty."""
    num_tiles = -(-capacity // GPU_ROW_TILE)
    return -(-capacity // (num_tiles * GRAIN)) * GRAIN
