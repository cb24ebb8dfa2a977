"""Alignment loses no token, keeps every job's order, and wastes as little as its cut points allow."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.fusion import align
from benchmarks.planning.fusion.align import chunk_length
from weft.errors import PlanError

batches = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=3
)


@settings(max_examples=120, deadline=None)
@given(batches, st.sampled_from([1, 4, 8, 16]))
def test_align_any_samples_loses_no_token_and_keeps_order(lengths: dict[str, list[int]], floor: int) -> None:
    """A job's chunks hold its samples' tokens, each once and in order; only a pack's last chunk is padded."""
    plan = align(lengths, floor_tokens=floor)
    for job, own in lengths.items():
        chunks = [c for c in plan.chunks if c.job == job]
        tokens = [(p.sample, p.start + i) for c in chunks for p in c.pieces for i in range(p.length)]
        assert tokens == [(sample, i) for sample, n in enumerate(own) for i in range(n)]
    for chunk, following in itertools.pairwise([*plan.chunks, None]):
        assert chunk is not None and 0 < chunk.num_tokens <= plan.chunk_tokens
        is_last = following is None or following.pack != chunk.pack
        assert is_last or chunk.num_tokens == plan.chunk_tokens


@settings(max_examples=120, deadline=None)
@given(batches, st.sampled_from([1, 4, 8, 16]))
def test_align_any_samples_chunk_waits_exactly_where_a_sample_goes_on(
    lengths: dict[str, list[int]], floor: int
) -> None:
    """Chunk k of a sample is after chunk k − 1, and reads back to the chunk where its first sample begins."""
    plan = align(lengths, floor_tokens=floor)
    for number, chunk in enumerate(plan.chunks):
        first = chunk.pieces[0]
        assert (chunk.after is None) == (first.start == 0)
        if chunk.after is not None:
            previous = plan.chunks[chunk.after].pieces[-1]
            assert chunk.after == number - 1
            assert (plan.chunks[chunk.after].pack, previous.sample) == (chunk.pack, first.sample)
            assert previous.start + previous.length == first.start
        begin = plan.chunks[number - chunk.context_chunks]
        assert any(p.sample == first.sample and p.start == 0 for p in begin.pieces) and begin.pack == chunk.pack


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.sampled_from([4, 8]), st.integers(0, 5))
def test_align_one_job_equals_brute_force_over_cut_points(own: list[int], floor: int, extra: int) -> None:
    """No cut points within the pack limit give fewer chunks, or as many with fewer that wait."""
    chunk = chunk_length(own, floor)
    limit = (math.ceil(max(own) / chunk) + extra) * chunk
    plan = align({"a": own}, floor_tokens=floor, pack_tokens=limit)
    options = []
    for mask in range(2 ** (len(own) - 1)):
        packs = [[own[0]]]
        for i, n in enumerate(own[1:]):
            packs.append([n]) if mask >> i & 1 else packs[-1].append(n)
        if max(map(sum, packs)) <= limit:
            starts = [set(itertools.accumulate(p, initial=0)) for p in packs]
            waits = sum(b not in s for p, s in zip(packs, starts, strict=True) for b in range(0, sum(p), chunk))
            options.append((sum(math.ceil(sum(p) / chunk) for p in packs), waits))
    assert (len(plan.chunks), sum(c.after is not None for c in plan.chunks)) == min(options)


@settings(max_examples=100, deadline=None)
@given(batches, st.sampled_from([1, 4, 8, 16]))
def test_align_any_samples_wastes_no_more_than_packing(lengths: dict[str, list[int]], floor: int) -> None:
    """Neither padding nor attention exceeds that of the same packs as whole rows; padding is below a chunk a pack."""
    plan = align(lengths, floor_tokens=floor)
    tokens = sum(map(sum, lengths.values()))
    num_packs = len({c.pack for c in plan.chunks})
    assert plan.chunked.padding_tokens == sum(plan.chunk_tokens - c.num_tokens for c in plan.chunks)
    assert plan.chunked.padding_tokens < num_packs * plan.chunk_tokens
    assert plan.chunked.padding_tokens <= plan.packed.padding_tokens
    assert 0 <= plan.chunked.needless_pairs <= plan.packed.needless_pairs
    for waste in (plan.chunked, plan.packed, plan.padded):
        assert waste.rows - waste.padding_tokens == tokens
    if plan.chunk_tokens == 1:
        assert plan.chunked.padding_tokens == plan.chunked.needless_pairs == 0


def test_align_published_lengths_needs_no_padding() -> None:
    """Samples of 64, 128 and 256 tokens: chunks of 64 without padding, where padding to 256 wastes 43 %."""
    plan = align({"sst2": [64] * 4, "qa": [128] * 4, "rte": [256] * 4})
    assert (plan.chunk_tokens, plan.pack_tokens, len(plan.chunks)) == (64, 256, 28)
    assert plan.chunked.padding_tokens == 0
    assert plan.padded.padding_tokens / plan.padded.rows == pytest.approx(0.4167, abs=1e-4)
    assert plan.chunked.needless_pairs == 0
    assert plan.packed.needless_pairs > 0


def test_align_sample_longer_than_chunk_is_cut_in_order() -> None:
    """10, 3 and 7 tokens in chunks of 8, packs of 16: the first pack is cut through its first sample."""
    plan = align({"a": [10, 3, 7]}, floor_tokens=8)
    pieces = [[(p.sample, p.start, p.length) for p in c.pieces] for c in plan.chunks]
    assert pieces == [[(0, 0, 8)], [(0, 8, 2), (1, 0, 3)], [(2, 0, 7)]]
    assert [(c.pack, c.after, c.context_chunks) for c in plan.chunks] == [(0, None, 0), (0, 0, 1), (1, None, 0)]


@pytest.mark.parametrize(
    ("lengths", "floor", "expected"), [([64, 128], 16, 64), ([96, 160], 16, 32), ([17, 33], 16, 16), ([6], 1, 2)]
)
def test_chunk_length_is_the_greatest_dividing_power_of_two_or_the_floor(
    lengths: list[int], floor: int, expected: int
) -> None:
    """96 and 160 share 32; odd lengths fall back to the floor."""
    assert chunk_length(lengths, floor) == expected


def test_align_bad_input_raises_plan_error() -> None:
    """No samples, empty ones, a floor that is no power of two, packs too short or not in whole chunks."""
    with pytest.raises(PlanError, match="sample lengths are"):
        align({"a": []})
    with pytest.raises(PlanError, match="sample lengths are"):
        align({"a": [3, 0]})
    with pytest.raises(PlanError, match="floor_tokens is 12"):
        align({"a": [3]}, floor_tokens=12)
    for pack_tokens in (8, 20):
        with pytest.raises(PlanError, match=f"pack_tokens is {pack_tokens}; use a multiple of the chunk length 8"):
            align({"a": [9, 3]}, floor_tokens=8, pack_tokens=pack_tokens)
