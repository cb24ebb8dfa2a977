"""A run goes over to pairs by what its own passes wait for, and gives them up when they take longer than alone."""

from __future__ import annotations

from dataclasses import replace

from weft.engine.lookahead import LookaheadPlanner
from weft.engine.timeline import TimelineRecorder
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.learned import MeasuredPairs
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.program import Program
from weft.plan.simulate.choose import pipeline_planner
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Batch, JobQueue, Limits

SHAPE = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict())
COST = AnalyticCost(SHAPE, find_hardware("cpu"), tensor_parallel=2)
QUEUES = [JobQueue(job, tuple(Batch(step, 0, (512, 300)) for step in range(16)), True) for job in "ab"]
LIMITS = Limits(1024)


class Contrary:
    """Measurements that always speak for the other way, by this much."""

    def __init__(self, gain: float) -> None:
        self.gain, self.has_pairs = gain, False

    def learn(self, _: object) -> MeasuredPairs:
        share = 1.0 + self.gain if self.has_pairs else 1.0 - self.gain
        return MeasuredPairs({(name, 0): share for name in ("forward", "backward")})


def test_run_when_measurements_contradict_each_other_then_goes_to_and_fro_a_few_times_only(monkeypatch):
    plans = LookaheadPlanner(pipeline_planner("auto", COST, in_pairs=True), TimelineRecorder())
    program, _ = planned(plans)
    plans.observe_stages(program, simulate(program, COST).spans)
    contrary, changes = Contrary(0.07), 0
    monkeypatch.setattr(plans, "_pairs", contrary)
    for _ in range(8):
        program, _ = planned(plans)
        changes += bool(program.pairs) != contrary.has_pairs
        contrary.has_pairs = bool(program.pairs)
    assert changes == 3 and contrary.has_pairs, "1 %, 2 % and 4 % were gained, and 8 % were not"


def planned(plans: LookaheadPlanner) -> tuple[Program, tuple[int, float | None] | None]:
    """The next program, however long it takes to plan, and the choice of its pairs."""
    plans.foresee(QUEUES, LIMITS)
    program = plans.program(QUEUES, LIMITS, patience_s=600.0)
    choice_made = plans.pop_choice()
    choice = None if choice_made is None or choice_made.choice is None else choice_made.choice.pairs
    return program, None if choice is None else (choice.num_pairs, choice.gain)


def test_run_when_its_passes_wait_long_then_has_pairs_until_these_take_longer():
    plans = LookaheadPlanner(pipeline_planner("auto", COST, in_pairs=True), TimelineRecorder())
    program, choice_made = planned(plans)
    assert program.pairs == () and choice_made is not None and choice_made[0] == 0
    spans = simulate(program, COST).spans
    waiting = [replace(span, args={**span.args, "sums_s": 0.3 * span.duration_s}) for span in spans]
    plans.observe_stages(program, waiting)
    program, choice_made = planned(plans)
    assert len(program.pairs) >= 12 and choice_made is not None and choice_made[0] == len(program.pairs)
    assert choice_made[1] is not None and 0.2 < choice_made[1] < 0.3
    slow = [replace(span, duration_s=1.2 * span.duration_s) for span in simulate(program, COST).spans]
    plans.observe_stages(program, slow)
    program, choice_made = planned(plans)
    assert program.pairs == () and choice_made is not None and choice_made[0] == 0
    assert choice_made[1] is not None and choice_made[1] < -0.1
