"""Fused tasks are the best partition of the sorted tasks, cover each task once and fit in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.deploy.parts import measure_fuse
from weft.errors import PlanError
from weft.plan.cost.types import LinearCost
from weft.plan.fuse import FuseTask, Pipe, fuse, fuse_by_count


@dataclass(frozen=True)
class SaturatingCost(LinearCost):
    """Small microbatches take as long as one of `saturation` tokens; later stages are slower."""

    saturation: int = 1
    stage_ratio: float = 1.0

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        tokens = max(sum(lengths), self.saturation)
        return (self.fixed_s + self.token_s * tokens) * (1 + self.stage_ratio * stage)


@st.composite
def instances(draw: st.DrawFn, max_tasks: int = 10) -> tuple[list[FuseTask], Pipe]:
    tasks = [
        FuseTask(
            f"job{i}",
            tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))),
            adapter_s=draw(st.sampled_from([0.0, 1.0, 5.0])),
        )
        for i in range(draw(st.integers(1, max_tasks)))
    ]
    stages = draw(st.integers(1, 4))
    cost = SaturatingCost(
        fixed_s=draw(st.sampled_from([0.0, 1.0, 20.0])),
        backward_ratio=draw(st.sampled_from([1.0, 1.5])),
        saturation=draw(st.integers(1, 120)),
        stage_ratio=draw(st.sampled_from([0.0, 0.3])),
    )
    free = draw(st.none() | st.integers(120, 600).map(lambda n: (n,) * stages))
    return tasks, Pipe(cost, stages, draw(st.integers(1, 8)), free)


def partitions(tasks: list[FuseTask]) -> Iterator[list[list[FuseTask]]]:
    """Every way to cut the sorted tasks."""
    ordered = sorted(tasks, key=lambda t: (sum(t.lengths), t.job))
    for num_cuts in range(len(ordered)):
        for cuts in itertools.combinations(range(1, len(ordered)), num_cuts):
            edges = [0, *cuts, len(ordered)]
            yield [ordered[a:b] for a, b in itertools.pairwise(edges)]


def latency(partition: list[list[FuseTask]], pipe: Pipe) -> float:
    """The latency model, written out once more; infinite where memory does not suffice."""
    total = 0.0
    for index, tasks in enumerate(partition):
        lengths = [n for t in tasks for n in t.lengths]
        adapters = sum(t.adapter_s for t in tasks)
        passes = []
        for stage in range(pipe.num_stages):
            copies = pipe.num_stages - stage if len(tasks) > 1 else 1
            if pipe.free_bytes and copies * sum(lengths) > pipe.free_bytes[stage]:
                return math.inf
            passes.append(pipe.cost.forward_s(lengths, stage) + pipe.cost.backward_s(lengths, stage) + 2 * adapters)
        if index == 0:
            total += sum(passes) + (pipe.num_microbatches - 1) * max(passes)
        else:
            total += pipe.num_microbatches * sum(passes) / len(passes)
    return total


@settings(max_examples=60, deadline=None)
@given(instances())
def test_fuse_any_small_instance_equals_brute_force(instance: tuple[list[FuseTask], Pipe]) -> None:
    """The latency is the least of all partitions of the sorted tasks, and that of the partition returned."""
    tasks, pipe = instance
    fusion = fuse(tasks, pipe)
    least = min(latency(p, pipe) for p in partitions(tasks))
    assert fusion.latency_s == pytest.approx(least, rel=1e-12)
    assert latency([list(f.tasks) for f in fusion.fused], pipe) == pytest.approx(least, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(instances(max_tasks=7))
def test_fuse_by_count_every_count_equals_brute_force(instance: tuple[list[FuseTask], Pipe]) -> None:
    """F(n, j) is the least of all partitions into j, and j is missing exactly where memory forbids it."""
    tasks, pipe = instance
    least: dict[int, float] = {}
    for partition in partitions(tasks):
        least[len(partition)] = min(latency(partition, pipe), least.get(len(partition), math.inf))
    found = {len(f.fused): f.latency_s for f in fuse_by_count(tasks, pipe)}
    assert found == pytest.approx({count: s for count, s in least.items() if s < math.inf}, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(instances(), st.randoms())
def test_fuse_tasks_in_any_order_covers_each_once_and_is_deterministic(
    instance: tuple[list[FuseTask], Pipe], rng: object
) -> None:
    """Every task is in exactly one fused task, which fits in memory; the order given does not matter."""
    tasks, pipe = instance
    fusion = fuse(tasks, pipe)
    assert sorted(t.job for f in fusion.fused for t in f.tasks) == sorted(t.job for t in tasks)
    assert all(pipe.fits(f) for f in fusion.fused)
    shuffled = list(tasks)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fuse(shuffled, pipe) == fusion


def test_fuse_idle_device_batches_and_full_device_interleaves() -> None:
    """Below saturation tasks are batched; on a full device with slow stages they are kept apart."""
    tasks = [FuseTask(f"job{i}", (10,)) for i in range(4)]
    idle = Pipe(SaturatingCost(saturation=40), num_stages=2, num_microbatches=4)
    full = Pipe(SaturatingCost(saturation=10), num_stages=2, num_microbatches=4)
    assert [f.jobs for f in fuse(tasks, idle).fused] == [("job0", "job1", "job2", "job3")]
    assert len(fuse(tasks, full).fused) > 1


def test_latency_one_fused_task_equals_the_makespan_of_1f1b() -> None:
    """Alone, C microbatches through S equal stages take (S − 1 + C) passes."""
    pipe = Pipe(LinearCost(token_s=1.0), num_stages=3, num_microbatches=5)
    assert fuse([FuseTask("a", (4, 6))], pipe).latency_s == (3 - 1 + 5) * 20


def test_fuse_64_tasks_is_quick() -> None:
    """The target is half a second of one core; a slow one may take twice that."""
    assert set(measured := measure_fuse(repeats=3)) == {"htask64_s"}
    assert measured["htask64_s"] <= 1.0


def test_fuse_task_without_memory_is_named() -> None:
    with pytest.raises(PlanError, match="big: one microbatch of 90 tokens does not fit"):
        fuse([FuseTask("small", (9,)), FuseTask("big", (90,))], Pipe(LinearCost(), free_bytes=(50,)))
