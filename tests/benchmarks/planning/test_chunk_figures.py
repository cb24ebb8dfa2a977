"""Chunks of a sample follow each other as drawn, cost what the whole sample costs, and are compared with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.pipeline.four_jobs import MIXES, queues
from benchmarks.planning import chunks
from benchmarks.planning.chunked import ChunkCost, build_cut, cut
from benchmarks.planning.chunks import ALL, MODES, Pipeline, Setting, steady_bubble
from weft.errors import PlanError
from weft.plan.cost.types import LinearCost
from weft.plan.pack.greedy import pack
from weft.plan.pipeline.build import Schedule, build
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Limits, Microbatch, Segment

COST = LinearCost(fixed_s=100.0, backward_ratio=2.0)
SAMPLE = Microbatch((Segment("a", 0, 0, 8 * 16),))


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 1), (2, 8), (4, 1), (4, 2), (4, 8)])
def test_one_sample_when_in_chunks_then_stages_idle_by_closed_form(num_stages, num_chunks):
    stream = cut([SAMPLE], 8 * 16 // num_chunks, in_chunks=True)
    assert stream.backward_order == list(range(num_chunks))[::-1]
    timeline = simulate(build_cut(stream, num_stages, COST), COST)
    chunk_s = 3 * (100 + 8 * 16 / num_chunks)
    assert timeline.makespan_s == pytest.approx((num_chunks + num_stages - 1) * chunk_s)
    assert timeline.bubble_ratio() == pytest.approx((num_stages - 1) / (num_chunks + num_stages - 1))
    assert timeline.peak_bytes(num_stages - 1) == 8 * 16, "a stage holds the whole sample"


@pytest.mark.parametrize("memory_bytes", [None, [20_000] * 4])
def test_build_cut_when_nothing_is_cut_then_the_program_is_that_of_training(memory_bytes):
    turns = pack(queues(MIXES[-1], 128, 8), Limits(8192, ALL)).turns
    stream = [turn.microbatch for turn in turns if turn.microbatch.segments]
    uncut = build_cut(cut(stream, 8192, in_chunks=True), 4, COST, memory_bytes)
    assert uncut == build(Schedule.EAGER, stream, 4, cost=COST, memory_bytes=memory_bytes)


def test_steady_bubble_when_microbatches_are_equal_then_only_filling_and_draining_is_left_out():
    stream = [Microbatch((Segment("a", 0, index, 64),)) for index in range(16)]
    even = LinearCost()
    timeline = simulate(build_cut(cut(stream, 64, in_chunks=True), 4, even), even)
    assert timeline.bubble_ratio() == pytest.approx(3 / 19)
    assert steady_bubble(timeline) == pytest.approx(0.0)


def test_cut_when_samples_are_short_and_long_then_only_long_ones_go_on():
    short, long, last = (Segment("a", 0, index, n) for index, n in enumerate((30, 80, 20)))
    pieces = cut([Microbatch((short, long, last))], 40, in_chunks=True)
    lengths = [
        [(s.index, int(s.length), getattr(s.length, "before", 0)) for s in m.segments] for m in pieces.microbatches
    ]
    assert lengths == [[(0, 30, 0), (1, 10, 0)], [(1, 40, 10)], [(1, 30, 50)], [(2, 20, 0)]]
    assert pieces.backward_order == [2, 1, 0, 3]
    whole = cut([Microbatch((short, long, last))], 40, in_chunks=False)
    assert [m.segments for m in whole.microbatches] == [(short,), (long,), (last,)]
    with pytest.raises(PlanError, match="no memory for all chunks of a sample"):
        build_cut(pieces, 2, COST, [100, 100])


@pytest.mark.parametrize("mode", MODES)
def test_chunks_when_memory_and_launches_cost_nothing_then_take_the_time_of_the_whole_sample(mode):
    one = Pipeline.of(Setting("8b", 2, 1), mode, 16_384, 2)
    free = replace(one.whole, hardware=replace(one.whole.hardware, memory_rate=1e30, launch_s=0.0))
    (sample,) = cut([Microbatch((Segment("a", 0, 0, 16_384),))], ALL, in_chunks=True).microbatches
    parts = cut([sample], 2048, in_chunks=True).microbatches
    for cost, most in ((ChunkCost(free), 1 + 1e-6), (one.cost, 1.2)):
        for seconds in (cost.forward_s, cost.backward_s):
            ratio = sum(seconds([part.segments[0].length], 1) for part in parts) / seconds([16_384], 1)
            assert 1 - 1e-6 < ratio < most
    held = sum(one.cost.held_bytes([part.segments[0].length], 1) for part in parts)
    keys_and_values = 16_384 * 2 * 8 * 128 * one.whole.memory.layers(1)
    each = 4 + 2 * (mode == "full")
    assert held == pytest.approx(one.cost.held_bytes([16_384], 1) + each * keys_and_values)


def test_bench_chunks_when_run_then_shows_and_keeps_its_figures(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "FEWEST_SAMPLES", 8)
    monkeypatch.setattr(chunks, "PARTS", {"one": lambda: chunks.measure(Setting("8b", 2, 1, 2, 50))})
    kept = tmp_path / "chunks.json"
    result = bench("chunks", "--json", kept)
    assert result.code == 0, result
    found = {key.removeprefix("8b_2_1x2_50of16k_"): value for key, value in json.loads(kept.read_text()).items()}
    assert found["pieces_s"] <= found["today_s"]
    assert found["saved"] == pytest.approx(1 - found["chunks_2048_s"] / found["today_s"], abs=1e-3)
    assert found["chunks_2048_s"] < found["today_s"] and found["chunks_bubble"] < found["today_bubble"]
    assert found["chunks_gb"] < 79.2 * 2**30 / 1e9
    assert found["replicas_s"] > 0
