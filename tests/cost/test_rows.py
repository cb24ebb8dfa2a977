"""Rows of frozen products."""

from __future__ import annotations

import pytest

from weft.cost.rows import gpu_row_tile


@pytest.mark.parametrize(
    ("capacity", "tile", "rows"),
    [
        (8192, 2048, 8192),
        (6144, 2048, 6144),
        (12800, 1856, 12992),
        (3000, 1536, 3072),
        (2049, 1088, 2176),
        (100, 128, 128),
    ],
)
def test_gpu_row_tile_when_capacity_is_no_multiple_then_whole_tiles_hardly_pass_it(capacity, tile, rows):
    """A full microbatch must not run half a tile of nothing: 12,800 tokens take 12,992 rows, not 14,336."""
    assert gpu_row_tile(capacity) == tile
    assert -(-capacity // tile) * tile == rows
