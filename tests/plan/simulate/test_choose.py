"""The pipeline that is chosen is at least as good as any of its parts."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.check import violations
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.fit import MicrobatchLoad
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.learned import FEWEST, PASSES, AdapterTimes, StagePace
from weft.plan.cost.shape import ModelShape
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.append import DealtStream, joined_all
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.planner import MeasuredPasses
from weft.plan.program import Program
from weft.plan.simulate.choose import FastestPipeline, pipeline_planner
from weft.plan.simulate.interpret import simulate
from weft.plan.spread import SpreadPlanner
from weft.plan.types import Batch, JobQueue, Limits


def jobs() -> list[JobQueue]:
    rng = random.Random(0)
    return [
        JobQueue(
            f"job{j}", tuple(Batch(b, 0, tuple(rng.randint(1, 30 + 10 * j) for _ in range(6))) for b in range(4)), True
        )
        for j in range(3)
    ]


@st.composite
def queues_of_any_kind(draw: st.DrawFn) -> list[JobQueue]:
    """With steps anywhere, unequal numbers of batches, and now and then a lane or groups, which rounds do not take."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)
        batches = [Batch(7 + n, 0, tuple(draw(sizes))) for n in range(draw(st.integers(1, 4)))]
        lane = draw(st.sampled_from(["", "", "own"]))
        found.append(JobQueue(f"job{number}", tuple(batches), draw(st.booleans()), lane=lane))
    return found


@settings(max_examples=30)
@given(queues=queues_of_any_kind(), num_stages=st.integers(1, 4), most=st.integers(1, 3))
def test_fastest_pipeline_of_any_queues_keeps_every_order_and_is_no_slower_than_the_greedy_one(
    queues: list[JobQueue], num_stages: int, most: int
) -> None:
    """So it trains the same bits, and no job loses by it."""
    limits, cost = Limits(9, most), LinearCost(fixed_s=2.0, pair_s=0.1, send_s=0.1)
    planner = FastestPipeline(num_stages, cost)
    program = planner(queues, limits)
    assert violations(program, queues, limits) == []
    greedy = planner.quick(queues, limits)
    assert simulate(program, cost).makespan_s <= simulate(greedy, cost).makespan_s


def test_fastest_pipeline_when_empty_microbatches_cost_nothing_then_one_stage_has_none() -> None:
    """No job waits there for what is to be kept apart."""
    limits = Limits(1024, 16)
    for seed in (0, 5, 7, 9):
        rng = random.Random(seed)
        batches = [Batch(step, 0, tuple(rng.randint(12, 18) for _ in range(8))) for step in range(7)]
        queues = [JobQueue("a", tuple(batches), True)]
        program = FastestPipeline(1, LinearCost(fixed_s=0.0, token_s=1e-4))(queues, limits)
        assert violations(program, queues, limits) == []


def test_fastest_pipeline_when_all_sums_are_free_then_takes_samples_out_of_order_where_that_is_faster() -> None:
    """And never where a single job's are not."""
    lengths = (60, 60, 60, 60, 40, 40, 40, 40)
    free = [JobQueue(job, tuple(Batch(n, 0, lengths) for n in range(2)), True, home=None) for job in "ab"]
    planner, limits = FastestPipeline(2, LinearCost(fixed_s=50.0)), Limits(100)
    assert violations(planner(free, limits), free, limits) == []
    ordered = [dataclasses.replace(queue, home=0) for queue in free]
    seconds = [simulate(planner(own, limits), planner.cost).makespan_s for own in (free, ordered)]
    assert seconds[0] < seconds[1]
    mixed = [free[0], ordered[1]]
    assert violations(planner(mixed, limits), mixed, limits) == []


def test_fastest_pipeline_when_jobs_are_unlike_then_is_faster_than_the_greedy_one() -> None:
    planner = FastestPipeline(3, LinearCost(fixed_s=5.0, pair_s=0.01))
    limits = Limits(160)
    seconds = [simulate(plan(jobs(), limits), planner.cost).makespan_s for plan in (planner, planner.quick)]
    assert seconds[0] < 0.9 * seconds[1]


IN_FLIGHT = [((), (4, 4)), ((9, 9), (4, 4)), ((3, 1), (3, 1)), ((1, 2), (1, 1))]


def held(program: Program, cost: LinearCost) -> list[int]:
    """Most full microbatches in flight on each stage."""
    timeline = simulate(program, cost)
    return [timeline.peak_bytes(stage) // 10 for stage in range(program.num_stages)]


@pytest.mark.parametrize(("in_flight", "most"), IN_FLIGHT)
def test_program_when_its_last_stage_is_slow_then_holds_what_its_stages_have_memory_for(in_flight, most):
    """The first one would run ahead for ever; with more memory than is needed it stops at twice the stages."""
    cost, queues = _SlowEnd(), [JobQueue("a", (Batch(0, 0, (10,) * 24),), True)]
    for sizes in ((2,), (2, 1)):
        limits = Limits(10, 100, in_flight=(*in_flight, 1)[: sum(sizes)] if in_flight else ())
        spread = SpreadPlanner(sizes, (cost,) * len(sizes))
        for planner in [spread] if len(sizes) > 1 else [FastestPipeline(2, cost), PipelinePlanner(Schedule.EAGER, 2)]:
            program = planner(queues, limits)
            appended = joined_all([DealtStream.of(program)], planner.open_pipes(limits), [(cost, None) for _ in sizes])
            assert held(appended, cost)[0] == most[0]
            for each in (program, appended):
                assert held(each, cost)[0] <= most[0] and violations(each, queues, limits) == []


@pytest.mark.parametrize("schedule", Schedule)
def test_schedule_when_stages_have_little_memory_then_keeps_to_it_and_a_program_that_does_not_is_refused(schedule):
    limits, queues = Limits(10, 100, in_flight=(2, 1)), [JobQueue("a", (Batch(0, 0, (10,) * 24),), True)]
    program = PipelinePlanner(schedule, 2)(queues, limits)
    assert violations(program, queues, limits) == [] and held(program, LinearCost())[0] <= 2
    ample = PipelinePlanner(Schedule.GPIPE, 2)(queues, Limits(10, 100))
    assert any("brings the stage to 30 rows; it has 20" in found for found in violations(ample, queues, limits))


class _SlowEnd(LinearCost):
    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return (1.0, 5.0)[stage] * sum(lengths)

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self.forward_s(lengths, stage)


def test_choice_when_adapters_cost_by_the_job_then_jobs_are_grouped_and_the_gain_is_reported() -> None:
    """A job that is in fewer microbatches runs its adapter less often."""
    planner = FastestPipeline(3, LinearCost(fixed_s=5.0), AdapterTimes(100.0, 0.0))
    choice = planner.choose(jobs(), Limits(400))
    assert len(choice.groups) > 1 and sorted(sum(choice.groups, ())) == ["job0", "job1", "job2"]
    assert choice.seconds == choice.several_groups_s < 0.9 * choice.one_group_s
    assert violations(choice.program, jobs(), Limits(400)) == []
    measured = simulate(choice.program, planner.cost, adapters=planner.adapters).makespan_s
    assert measured == choice.seconds


@pytest.mark.parametrize(("job_s", "num_groups"), [(0.0, 1), (100.0, 3)])
def test_choice_when_the_time_of_a_job_was_measured_then_it_decides_about_groups(job_s: float, num_groups: int) -> None:
    """MuxTune's equation 3 with what microbatches of one group took, which hold different jobs."""
    cost, true = LinearCost(fixed_s=5.0), AdapterTimes(job_s, 0.0)
    planner, ranks, pace = FastestPipeline(3, cost), dict.fromkeys(("job0", "job1", "job2"), 8), StagePace()
    before = planner.choose(jobs(), Limits(400))
    assert len(before.groups) == 1
    for microbatch in (m for m in before.program.microbatches if m.segments):
        own = {job: [s.length for s in microbatch.segments if s.job == job] for job in microbatch.job_tokens}
        load = MicrobatchLoad.of([(8, lengths) for lengths in own.values()], 0)
        seconds = cost.forward_s([s.length for s in microbatch.segments], 0) + true.microbatch_s(microbatch.job_tokens)
        for name, stage in itertools.product(PASSES, range(3)):
            for _ in range(FEWEST):
                pace.note_pass(name, stage, load, seconds)
    after = planner.informed(MeasuredPasses(pace, ranks=ranks), ()).choose(jobs(), Limits(400))
    assert len(after.groups) == num_groups


def test_planner_of_stages_when_nothing_was_measured_then_the_table_s_price_of_a_job_counts() -> None:
    table = AnalyticCost(ModelShape("small", 64, 128, 4, 4, 2, 16, 500), find_hardware("h200"), num_stages=2)
    planner = pipeline_planner("auto", table)
    assert isinstance(planner, FastestPipeline) and (planner.cost, planner.adapters) == table.apart()


def test_choice_when_microbatches_cost_by_the_piece_then_one_group_is_best_and_its_gain_is_reported() -> None:
    """Few full microbatches, whichever jobs are in them."""
    choice = FastestPipeline(2, LinearCost(fixed_s=500.0)).choose(jobs(), Limits(160))
    assert choice.groups == (("job0", "job1", "job2"),)
    assert choice.several_groups_s is None or choice.several_groups_s > 0.99 * choice.seconds
