"""Predicted and measured seconds of every step and replica, from the passes that a program ran."""

from __future__ import annotations

import dataclasses

import pytest

from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import LinearCost
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.step_shares import STEP_SPAN, step_spans
from weft.plan.spread import SpreadPlanner
from weft.plan.types import Batch, JobQueue, Limits

COSTS = (LinearCost(), LinearCost(token_s=0.5))


def test_steps_when_they_run_as_predicted_then_predictions_are_what_is_measured():
    """Three steps on a replica of one stage and one of two: tokens, seconds and busy shares of each."""
    queue = JobQueue("a", tuple(Batch(n, 0, (40, 30, 20, 10, 5)) for n in range(2, 5)), is_all=True, home=None)
    program = SpreadPlanner((1, 2), COSTS)([queue], Limits(64))
    ran = simulate(program, COSTS)
    spans = step_spans(program, [(cost, None) for cost in COSTS], ran.spans, 0.0)
    assert [span.args["replica"] for span in spans] == [0, 1] * 3 and {span.name for span in spans} == {STEP_SPAN}
    for first, second in zip(spans[::2], spans[1::2], strict=True):
        assert first.args["tokens"] + second.args["tokens"] == 105 and (first.stage, second.stage) == (0, 1)
        assert max(first.args["longest"], second.args["longest"]) == 40
        assert (first.start_s, first.duration_s) == (second.start_s, second.duration_s)
        for span in (first, second):
            assert span.args["seconds"] == pytest.approx(span.args["predicted_s"]) and span.args["seconds"] > 0
            assert 0 < span.args["busy"] <= 1 and not span.args["is_learnt"]
    ends = [span.end_s for span in spans[::2]]
    assert [span.start_s for span in spans[::2]] == pytest.approx([0.0, *ends[:-1]]) and ends[-1] <= ran.makespan_s


def test_steps_when_a_replica_is_slower_than_predicted_then_it_shows_and_others_are_idle():
    queue = JobQueue("a", (Batch(0, 0, (10,) * 8),), is_all=True, home=None)
    program = SpreadPlanner((1, 1), (LinearCost(),) * 2)([queue], Limits(64))
    learnt = [(LinearCost(), AdapterTimes(1.0, 0.0))] * 2
    spans = [
        dataclasses.replace(span, duration_s=span.duration_s * (3 if span.stage else 1))
        for span in simulate(program, LinearCost()).spans
    ]
    first, second = (span.args for span in step_spans(program, learnt, spans, 0.0))
    assert first["predicted_s"] == second["predicted_s"] == 82.0 and first["is_learnt"]
    assert (first["seconds"], second["seconds"]) == (80.0, 240.0)
    assert second["busy"] > 0.99 > 0.6 > first["busy"]
