"""Rows of frozen products."""

from __future__ import annotations

import pytest

from weft.plan.cost.shape import capacities, choose_capacity, gpu_row_tile


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
    assert gpu_row_tile(capacity, 4096) == tile
    assert -(-capacity // tile) * tile == rows


def test_gpu_row_tile_when_the_backbone_is_wide_then_half_as_many_rows_fill_the_device():
    assert [gpu_row_tile(8192, hidden) for hidden in (2048, 5120, 8192, 16384)] == [2048, 2048, 1024, 1024]
    assert gpu_row_tile(2049, 8192) == 704


@pytest.mark.parametrize(
    ("device", "longest", "chosen"),
    [
        ("cpu", 0, 2048),
        ("cpu", 2048, 2048),
        ("cpu", 2049, 4096),
        ("cuda", 1024, 8192),
        ("NVIDIA H200", 8192, 8192),
        ("h200", 8193, 16384),
        ("h200", 40_000, 65_536),
    ],
)
def test_capacity_when_it_is_auto_then_depends_on_the_device_and_the_longest_sample(device, longest, chosen):
    assert choose_capacity("auto", device, longest) == chosen
    for number in (2, 100, 50_000):
        assert choose_capacity(number, device, longest) == number, "a number stays what it is"


def test_capacities_when_memory_is_short_then_only_auto_gives_way_and_not_below_a_tile_or_a_sample():
    assert capacities("auto", "h200", 1024) == [8192, 4096, 2048]
    assert capacities("auto", "h200", 3000) == [8192, 4096]
    assert capacities("auto", "h200", 9000) == [16384]
    assert capacities("auto", "cpu", 1024) == [2048]
    assert capacities(8192, "h200", 1024) == [8192]
    # Whatever is taken, rows run in the same tiles: what a job learns does not depend on it.
    assert {gpu_row_tile(capacity, 4096) for capacity in capacities("auto", "h200")} == {2048}
