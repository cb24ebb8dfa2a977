"""Counts and sizes as people read them."""

from __future__ import annotations

from weft.errors import counted, size


def test_count_when_it_is_one_then_its_noun_is_too():
    words = ("1 step", "0 steps", "2,048 steps", "1 microbatch", "3 microbatches")
    assert words == (
        counted(1, "step"),
        counted(0, "step"),
        counted(2048, "step"),
        counted(1, "microbatch"),
        counted(3, "microbatch"),
    )


def test_size_when_it_is_small_then_it_is_not_nothing():
    assert [size(n) for n in (1, 812, 2**20, 40 * 2**20, 3 * 2**29)] == [
        "1 byte",
        "812 bytes",
        "1.0 MiB",
        "40.0 MiB",
        "1.5 GiB",
    ]
