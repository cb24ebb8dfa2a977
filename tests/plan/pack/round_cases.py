"""Instances for packing tests, small enough for brute force, and brute force itself."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from weft.plan.pack.bins import taken
from weft.plan.pack.types import RoundPlan
from weft.plan.types import Batch, JobQueue, Microbatch, Segment

CAPACITY = 24


def segments_of(*lengths_by_job: list[int]) -> list[Segment]:
    return [Segment(f"job{j}", 0, i, n) for j, own in enumerate(lengths_by_job) for i, n in enumerate(own)]


def partitions(segments: list[Segment], max_bins: int) -> Iterator[list[list[Segment]]]:
    """Every way to put samples into at most so many bins."""
    if not segments:
        yield []
        return
    for rest in partitions(segments[1:], max_bins):
        for b in range(len(rest)):
            yield [[*own, segments[0]] if i == b else own for i, own in enumerate(rest)]
        if len(rest) < max_bins:
            yield [*rest, [segments[0]]]


def valid_packings(segments: list[Segment]) -> Iterator[list[list[Segment]]]:
    for bins in partitions(segments, len(segments)):
        if all(taken(own) <= CAPACITY for own in bins):
            yield bins


def fewest_by_force(segments: list[Segment]) -> int:
    return min(len(bins) for bins in valid_packings(segments))


SMALL = st.lists(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=3), min_size=1, max_size=2)


@st.composite
def jobs_to_pack(draw: st.DrawFn, max_length: int = CAPACITY) -> list[JobQueue]:
    """Jobs with several global batches of several sizes; some end before others."""
    made = []
    for j in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.lists(st.integers(1, max_length), min_size=1, max_size=6), min_size=1, max_size=4))
        first = draw(st.integers(0, 3))
        batches = tuple(Batch(first + b, 0, tuple(own)) for b, own in enumerate(lengths))
        made.append(JobQueue(f"job{j}", batches, draw(st.booleans())))
    return made


def all_segments(jobs: list[JobQueue]) -> list[Segment]:
    return [Segment(q.job, b.step, b.first + i, n) for q in jobs for b in q.batches for i, n in enumerate(b.lengths)]


def by_index(s: Segment) -> tuple[str, int, int]:
    return s.job, s.step, s.index


def stream_segments(stream: tuple[Microbatch, ...]) -> list[Segment]:
    return [s for m in stream for s in m.segments]


def problems(plan: RoundPlan, jobs: list[JobQueue]) -> list[str]:
    """What is wrong with a plan; written from the promises, not from any planner."""
    found = []
    if sorted(stream_segments(plan.stream), key=by_index) != sorted(all_segments(jobs), key=by_index):
        found.append("a sample is lost, doubled or changed")
    if any(m.num_tokens > plan.limits.capacity for m in plan.stream):
        found.append("a microbatch is above the capacity")
    last: dict[tuple[str, int], int] = {}
    for index, m in enumerate(plan.stream):
        for s in m.segments:
            last[s.job, s.step] = index
    for index, m in enumerate(plan.stream):
        for s in m.segments:
            if (before := last.get((s.job, s.step - 1))) is not None and index < before + plan.limits.lemma_distance:
                found.append(f"{s} at {index} comes too early after {before}")
    order: dict[str, list[tuple[int, int]]] = {}
    for s in stream_segments(plan.stream):
        order.setdefault(s.job, []).append((s.step, s.index))
    if plan.keeps_order and any(own != sorted(own) for own in order.values()):
        found.append("a job's order has changed")
    return found
