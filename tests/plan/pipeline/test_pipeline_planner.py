"""Programs for a replica of several stages are made of whole global batches, whatever the queues."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.check import violations
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.program import Step
from weft.plan.types import Batch, JobQueue, Limits

SCHEDULES = list(Schedule)


@st.composite
def job_queues(draw: st.DrawFn) -> list[JobQueue]:
    found = []
    for number in range(draw(st.integers(1, 3))):
        sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)
        batches = [Batch(7 + n, 0, tuple(draw(sizes))) for n in range(draw(st.integers(1, 3)))]
        priority, is_all = draw(st.integers(0, 1)), draw(st.booleans())
        found.append(
            JobQueue(f"job{number}", tuple(batches), is_all, priority, lane=draw(st.sampled_from(["", "own"])))
        )
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=25)
@given(queues=job_queues(), num_stages=st.integers(2, 4), most=st.integers(1, 6))
def test_program_of_any_queues_passes_the_validator_and_steps_all_it_begins(schedule, queues, num_stages, most):
    """Every job is served, in its own order, and no global batch is left open."""
    limits = Limits(9, most)
    program = PipelinePlanner(schedule, num_stages)(queues, limits)
    assert violations(program, queues, limits) == []
    begun = {(s.job, s.step) for m in program.microbatches for s in m.segments}
    stepped = {(i.job, i.step) for i in program.stages[0] if isinstance(i, Step)}
    assert begun == stepped and {job for job, _ in begun} == {queue.job for queue in queues}


def test_program_when_more_batches_fit_then_holds_several_of_each_job():
    """A pipeline drains at the end of a program, so that should not come after every step."""
    queue = JobQueue("job", tuple(Batch(step, 0, (4, 4)) for step in range(8)), is_all=False)
    program = PipelinePlanner(Schedule.ONE_F_ONE_B, 2)([queue], Limits(8, 1))
    assert [i.step for i in program.stages[0] if isinstance(i, Step)] == [0, 1, 2, 3]
