import math

import pytest
from made_events import step_done

from weft.engine.events import (
    CheckpointSaved,
    Event,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobPreempted,
    JobResumed,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    JobWarning,
    MicrobatchDone,
)
from weft.job_state import Reason, ReasonCode
from weft.report.live import RATE_WINDOW_S, Rate, RunProgress

WHY = Reason(ReasonCode.ERROR, "because")


def test_rate_when_amounts_come_steadily_then_it_is_theirs() -> None:
    rate = Rate()
    assert rate.per_s is None
    rate.add(2.0, 999.0)
    assert rate.per_s is None
    for i in range(1, 6):
        rate.add(2.0 + 0.5 * i, 50.0)
    assert rate.per_s == pytest.approx(100.0)


def test_rate_when_time_passes_then_the_past_is_forgotten() -> None:
    rate = Rate()
    for i in range(100):
        rate.add(float(i), 1000.0)
    for i in range(100, 100 + 2 * int(RATE_WINDOW_S)):
        rate.add(float(i), 10.0)
    assert rate.per_s == pytest.approx(10.0)


def test_tokens_per_s_when_jobs_step_together_then_their_rates_are_added_from_the_second_step_on() -> None:
    """Their first steps are microseconds apart, which does not show how fast they are."""
    run = RunProgress([("a", 50), ("b", 50)])
    run.apply(step_done("a", 1, seconds=4.0))
    run.apply(step_done("b", 1, seconds=4.00001))
    assert run.tokens_per_s is None
    run.apply(step_done("a", 2, seconds=6.0))
    run.apply(step_done("b", 2, seconds=6.00001))
    assert run.tokens_per_s == pytest.approx(100.0)
    run.apply(JobPaused("b", 2))
    assert run.tokens_per_s == pytest.approx(50.0)


def test_progress_when_steps_come_then_eta_follows_the_pace() -> None:
    run = RunProgress([("a", 50)])
    for i in range(1, 11):
        run.apply(step_done("a", i, seconds=2.0 * i))
    assert run.jobs["a"].eta_s == pytest.approx(80.0)
    run.apply(JobPaused("a", 10))
    assert run.jobs["a"].eta_s is None


@pytest.mark.parametrize(("factor", "trend"), [(0.9, -1), (1.0, 0), (1.1, 1)])
def test_trend_then_it_follows_the_loss(factor: float, trend: int) -> None:
    run = RunProgress([("a", 50)])
    for i in range(1, 21):
        run.apply(step_done("a", i, loss=2.0 * factor**i, seconds=float(i)))
    assert run.jobs["a"].trend == trend


def test_trend_when_one_loss_is_nan_then_the_later_ones_still_count() -> None:
    run = RunProgress([("a", 50)])
    for i in range(1, 21):
        run.apply(step_done("a", i, loss=math.nan if i == 3 else 2.0 * 0.9**i, seconds=float(i)))
    assert run.jobs["a"].trend == -1


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (JobStarted("a", 0, 50), "running"),
        (step_done("a", 1), "running"),
        (JobPaused("a", 1), "paused"),
        (JobResumed("a", 1), "running"),
        (JobWaiting("a", 0, WHY), "queued"),
        (JobPreempted("a", 1, WHY), "queued"),
        (JobCancelled("a", 1), "cancelled"),
        (JobFailed("a", 1, WHY), "failed"),
        (JobSucceeded("a", 50, None), "succeeded"),
        (CheckpointSaved("a", 1), "queued"),
    ],
)
def test_apply_then_the_event_sets_the_state(event: Event, state: str) -> None:
    run = RunProgress([("a", 50)])
    run.apply(event)
    assert run.jobs["a"].state == state


def test_apply_when_the_job_is_new_then_it_is_added() -> None:
    run = RunProgress([])
    run.apply(JobStarted("late", 0, 7))
    assert run.jobs["late"].num_steps == 7


def test_fill_then_it_is_tokens_over_rows_of_all_microbatches() -> None:
    run = RunProgress([])
    assert run.fill is None
    run.apply(MicrobatchDone(("a",), 100, 200, 0.1))
    run.apply(MicrobatchDone(("a", "b"), 200, 200, 0.1))
    assert run.fill == pytest.approx(0.75)
    assert run.jobs == {}


def test_apply_when_a_warning_concerns_several_jobs_or_none_then_no_job_is_added() -> None:
    """A warning is about jobs that are there; it must not show up as a job of its own."""
    run = RunProgress([("a", 50), ("b", 50)])
    run.apply(JobWarning(("a", "b"), "less memory than thought"))
    run.apply(JobWarning((), "the timeline could not be written"))
    assert list(run.jobs) == ["a", "b"]


def test_apply_when_a_job_is_resumed_then_it_stands_where_it_was() -> None:
    run = RunProgress([("a", 50)])
    run.apply(JobStarted("a", 30, 50))
    assert run.jobs["a"].step == 30
