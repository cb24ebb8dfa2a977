"""A run goes over to pairs by what its own passes wait for, and gives them up when they take longer than alone."""

from __future__ import annotations

from dataclasses import replace

from weft.engine.lookahead import LookaheadPlanner
from weft.engine.timeline import TimelineRecorder
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.program import Program
from weft.plan.simulate.choose import pipeline_planner
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Batch, JobQueue, Limits

SHAPE = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict())
COST = AnalyticCost(SHAPE, find_hardware("cpu"), tensor_parallel=2)
QUEUES = [JobQueue(job, tuple(Batch(step, 0, (512, 300)) for step in range(16)), True) for job in "ab"]
LIMITS = Limits(1024)


def planned(plans: LookaheadPlanner) -> tuple[Program, tuple[int, float | None] | None]:
    """The next program, however long it takes to plan, and what is told of its pairs."""
    plans.foresee(QUEUES, LIMITS)
    program = plans.program(QUEUES, LIMITS, patience_s=600.0)
    told = plans.pop_choice()
    choice = None if told is None or told.choice is None else told.choice.pairs
    return program, None if choice is None else (choice.num_pairs, choice.gain)


def test_run_when_its_passes_wait_long_then_has_pairs_until_these_take_longer():
    plans = LookaheadPlanner(pipeline_planner("auto", COST, in_pairs=True), TimelineRecorder())
    program, told = planned(plans)
    assert program.pairs == () and told is not None and told[0] == 0
    spans = simulate(program, COST).spans
    waiting = [replace(span, args={**span.args, "sums_s": 0.3 * span.duration_s}) for span in spans]
    plans.observe_stages(program, waiting)
    program, told = planned(plans)
    assert len(program.pairs) >= 12 and told is not None and told[0] == len(program.pairs)
    assert told[1] is not None and 0.2 < told[1] < 0.3
    slow = [replace(span, duration_s=1.2 * span.duration_s) for span in simulate(program, COST).spans]
    plans.observe_stages(program, slow)
    program, told = planned(plans)
    assert program.pairs == () and told is not None and told[0] == 0
    assert told[1] is not None and told[1] < -0.1
