"""Templates run every microbatch once per stage, in an order that can run, within memory."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.cost.types import LinearCost
from weft.plan.fuse import FusedTask, FuseTask, Pipe, Template, build_template, fuse, plan_fusion
from weft.plan.fuse.planner import bucket_templates


def lone(job: str, tokens: int) -> FusedTask:
    return FusedTask((FuseTask(job, (tokens,)),))


@st.composite
def setups(draw: st.DrawFn) -> tuple[list[FusedTask], list[tuple[int, ...]], Pipe]:
    fused = [lone(f"job{i}", draw(st.integers(1, 20))) for i in range(draw(st.integers(1, 5)))]
    indices = [draw(st.integers(0, 2)) for _ in fused]
    buckets = [tuple(i for i, p in enumerate(indices) if p == b) for b in sorted(set(indices))]
    stages = draw(st.integers(1, 4))
    cost = LinearCost(fixed_s=draw(st.integers(0, 3)), backward_ratio=draw(st.sampled_from([1.0, 2.0])), send_s=0.25)
    free = draw(st.none() | st.tuples(*[st.integers(100, 200)] * stages))
    return fused, buckets, Pipe(cost, stages, draw(st.integers(1, 5)), free)


def held_peak(template: Template, fused: list[FusedTask], stage: int) -> int:
    """Most tokens a stage holds, by walking its passes."""
    num_clocks = len({work.clock for work in template.stages[stage]})
    tokens = [sum(fused[i].num_tokens for i in template.buckets[b]) for b in clock_buckets(template, num_clocks)]
    held = peak = 0
    for work in template.stages[stage]:
        held += -tokens[work.clock] if work.is_backward else tokens[work.clock]
        peak = max(peak, held)
    return peak


def clock_buckets(template: Template, num_clocks: int) -> list[int]:
    """The bucket of each clock: equally many consecutive clocks for every bucket."""
    return [clock * len(template.buckets) // num_clocks for clock in range(num_clocks)]


@settings(max_examples=100, deadline=None)
@given(setups())
def test_template_any_setup_has_every_bucket_once_the_longest_first(
    setup: tuple[list[FusedTask], list[tuple[int, ...]], Pipe],
) -> None:
    fused, buckets, pipe = setup
    template = build_template(fused, buckets, pipe)
    assert sorted(template.buckets) == sorted(buckets)
    seconds = [sum(pipe.forward_s(fused[i], 0) for i in bucket) for bucket in template.buckets]
    assert seconds == sorted(seconds, reverse=True)


@settings(max_examples=100, deadline=None)
@given(setups())
def test_template_any_setup_respects_dependencies_and_memory(
    setup: tuple[list[FusedTask], list[tuple[int, ...]], Pipe],
) -> None:
    """A pass starts after what it needs has come; passes of a stage do not overlap; memory stays in its limit."""
    fused, buckets, pipe = setup
    template = build_template(fused, buckets, pipe)
    clocks = clock_buckets(template, len(buckets) * pipe.num_microbatches)
    times = {(s, p.clock, p.is_backward): p for s, passes in enumerate(template.stages) for p in passes}
    assert len(times) == 2 * pipe.num_stages * len(clocks) == sum(map(len, template.stages))
    for (stage, clock, is_backward), work in times.items():
        source = stage + 1 if is_backward else stage - 1
        bucket = template.buckets[clocks[clock]]
        transfer = 0.25 * sum(fused[i].num_tokens for i in bucket)
        if 0 <= source < pipe.num_stages:
            assert work.start_s >= times[source, clock, is_backward].end_s + transfer - 1e-9
        if is_backward:
            assert work.start_s >= times[stage, clock, False].end_s - 1e-9
        parts = [(pipe.backward_s if is_backward else pipe.forward_s)(fused[i], stage) for i in bucket]
        assert work.end_s - work.start_s == pytest.approx(sum(parts))
    for stage, passes in enumerate(template.stages):
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(passes))
        assert pipe.free_bytes is None or held_peak(template, fused, stage) <= pipe.free_bytes[stage]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 6))
def test_template_equal_passes_and_enough_memory_keeps_the_last_stage_busy(
    tokens: list[int], num_stages: int, num_microbatches: int
) -> None:
    """From its first forward to its last backward the last stage never idles (theorem 2 of MuxTune)."""
    fused = [lone(f"job{i}", n) for i, n in enumerate(tokens)]
    pipe = Pipe(LinearCost(), num_stages, num_microbatches)
    last = build_template(fused, [(i,) for i in range(len(fused))], pipe).stages[-1]
    assert last[0].start_s == (num_stages - 1) * max(tokens)
    assert last[-1].end_s - last[0].start_s == 2 * num_microbatches * sum(tokens)


def test_template_one_bucket_equals_1f1b() -> None:
    """C equal clocks through S stages take (S − 1 + C) passes."""
    template = build_template([lone("a", 5)], [(0,)], Pipe(LinearCost(), 3, 6))
    assert template.makespan_s == (3 - 1 + 6) * 10


def test_template_more_memory_launches_more_eagerly() -> None:
    """With little memory the first stage waits for backwards; with more it runs ahead and ends earlier."""
    fused, buckets = [lone("a", 10)], [(0,)]
    tight = build_template(fused, buckets, Pipe(LinearCost(), 3, 6, (10, 10, 10)))
    ample = build_template(fused, buckets, Pipe(LinearCost(), 3, 6, (60, 60, 60)))
    assert [p.is_backward for p in tight.stages[0][:4]] == [False, True, False, True]
    assert not any(p.is_backward for p in ample.stages[0][:3])
    assert ample.makespan_s < tight.makespan_s


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 4), st.none() | st.integers(60, 90))
def test_plan_fusion_any_tasks_covers_each_once_and_beats_every_bucketing(
    tokens: list[int], num_stages: int, free: int | None
) -> None:
    """Every job is planned once, within memory, no slower than the least modelled latency in any buckets."""
    tasks = [FuseTask(f"job{i}", (n,)) for i, n in enumerate(tokens)]
    pipe = Pipe(LinearCost(fixed_s=8.0), num_stages, 4, None if free is None else (free,) * num_stages)
    plan = plan_fusion(tasks, pipe)
    assert sorted(j for f in plan.fusion.fused for j in f.jobs) == sorted(t.job for t in tasks)
    fused = list(plan.fusion.fused)
    assert free is None or max(held_peak(plan.template, fused, stage) for stage in range(num_stages)) <= free
    published = [t.makespan_s for t in bucket_templates(fuse(tasks, pipe), pipe)]
    assert plan.template.makespan_s <= min(published)
    assert plan == plan_fusion(tasks[::-1], pipe)


def test_plan_fusion_is_json() -> None:
    """A plan is plain data."""
    plan = plan_fusion([FuseTask("a", (3,)), FuseTask("b", (4,))], Pipe(LinearCost(), 2, 2, (50, 50)))
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["template"]["stages"]
