"""Streams of fused groups hold every sample once, in its job's order, and only jobs of one group share microbatches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.check import violations
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import LinearCost
from weft.plan.fuse.planner import PipeCosts, grouped_streams
from weft.plan.pipeline.build import Schedule, build
from weft.plan.types import Batch, JobQueue

CAPACITY = 24


@st.composite
def whole_queues(draw: st.DrawFn) -> list[JobQueue]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        sizes = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=6)
        batches = [Batch(3 + n, 0, tuple(draw(sizes))) for n in range(draw(st.integers(1, 3)))]
        found.append(JobQueue(f"job{number}", tuple(batches), is_all=True))
    return found


@settings(max_examples=50, deadline=None)
@given(whole_queues(), st.integers(2, 4), st.sampled_from([0.0, 50.0]), st.sampled_from([1, 8]))
def test_grouped_streams_of_any_queues_keep_order_capacity_and_groups(
    queues: list[JobQueue], num_stages: int, job_s: float, row_tile: int
) -> None:
    """And each of them makes a program that the validator accepts."""
    costs = PipeCosts(num_stages, LinearCost(fixed_s=3.0), AdapterTimes(job_s, 0.0), row_tile)
    streams = list(grouped_streams(queues, CAPACITY, costs))
    assert streams
    for stream in streams:
        assert sorted(job for group in stream.groups for job in group) == sorted(queue.job for queue in queues)
        group_of = {job: number for number, group in enumerate(stream.groups) for job in group}
        for microbatch in stream.microbatches:
            (group,) = {group_of[job] for job in microbatch.job_tokens}
            assert microbatch.num_tokens <= stream.fills[group] <= CAPACITY
        for queue in queues:
            own = [(s.step, s.index) for m in stream.microbatches for s in m.segments if s.job == queue.job]
            assert own == [(b.step, i) for b in queue.batches for i in range(len(b.lengths))]
        assert violations(build(Schedule.EAGER, stream.microbatches, num_stages), queues) == []
