"""A run changes its layout when that pays, and never for nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.layout import Layout, parse_layout
from weft.plan.replan import MOST_PHASES, LayoutForecast, MoveCost, Prediction, RemainingJob, decide, phases

NOW, OTHER = parse_layout("stages:2"), parse_layout("spread:2")
SECONDS = st.floats(0, 1e6)


def forecast(now_s: float | None, planned_s: float, planned: Layout = OTHER) -> LayoutForecast:
    now = None if now_s is None else Prediction(NOW, 1.0, now_s)
    return LayoutForecast(now, Prediction(planned, 1.0, planned_s), 100.0, 2000)


@given(SECONDS, SECONDS, st.floats(1e-3, 1e3), SECONDS, SECONDS)
def test_decision_when_anything_is_forecast_then_what_is_done_takes_no_longer_than_what_is_not(a, b, pace, save, load):
    """In seconds of the run; and the sentence states what is done."""
    found = decide(NOW, forecast(a, b), pace, MoveCost(save, load))
    moved_s, kept_s = save + load + pace * b, pace * a
    if found.moves:
        assert moved_s <= kept_s or math.isclose(moved_s, kept_s)
        assert "it saves about" in found.reason
    else:
        assert kept_s <= moved_s or math.isclose(moved_s, kept_s)
        assert "would save" in found.reason
    assert not decide(NOW, forecast(a, b, NOW), pace, MoveCost(0.0, 0.0)).moves


def test_decision_when_the_layout_of_now_cannot_hold_a_sample_then_it_moves_whatever_that_costs():
    found = decide(NOW, forecast(None, 1e9), 1.0, MoveCost(1e6, 1e6))
    assert found.moves and found.gain_s is None
    assert found.reason == "samples of up to 2,000 tokens fit on no replica there was"


def test_decision_when_the_question_makes_no_sense_then_refused():
    with pytest.raises(PlanError, match="0 or more"):
        MoveCost(-1.0, 0.0)
    with pytest.raises(PlanError, match="more than 0"):
        decide(NOW, forecast(1.0, 1.0), 0.0, MoveCost(0.0, 0.0))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_phases_when_jobs_end_at_any_steps_then_no_step_of_a_job_is_left_out(steps):
    """Few phases, which follow one another until the last job ends; who trains on is in every one of them."""
    jobs = [RemainingJob(f"job{n}", 1, (16,), 8, own) for n, own in enumerate(steps)]
    found = phases(jobs)
    assert len(found) <= MOST_PHASES + 1 and sum(count for _, count in found) == max(steps)
    done = 0
    for own, count in found:
        assert count > 0 and [job.name for job in own] == [job.name for job in jobs if job.num_steps > done]
        done += count
    if len(set(steps) - {0}) <= MOST_PHASES:
        assert all(job.num_steps == sum(count for own, count in found if job in own) for job in jobs)
