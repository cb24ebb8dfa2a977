import math

import pytest

from weft.report.progress import RATE_WINDOW_S, Rate, RunProgress


def step(job: str, number: int, loss: float, seconds: float, tokens: int = 100) -> dict[str, object]:
    return {"job": job, "step": number, "num_steps": 50, "loss": loss, "tokens": tokens, "seconds": seconds}


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


def test_progress_when_steps_come_then_eta_follows_the_pace() -> None:
    run = RunProgress([("a", 50)])
    for i in range(1, 11):
        run.apply("step", step("a", i, 1.0, 2.0 * i))
    assert run.jobs["a"].eta_s == pytest.approx(80.0)
    run.apply("paused", {"job": "a"})
    assert run.jobs["a"].eta_s is None


@pytest.mark.parametrize(("factor", "trend"), [(0.9, -1), (1.0, 0), (1.1, 1)])
def test_trend_then_it_follows_the_loss(factor: float, trend: int) -> None:
    run = RunProgress([("a", 50)])
    for i in range(1, 21):
        run.apply("step", step("a", i, 2.0 * factor**i, float(i)))
    assert run.jobs["a"].trend == trend


def test_trend_when_one_loss_is_nan_then_the_later_ones_still_count() -> None:
    run = RunProgress([("a", 50)])
    for i in range(1, 21):
        run.apply("step", step("a", i, math.nan if i == 3 else 2.0 * 0.9**i, float(i)))
    assert run.jobs["a"].trend == -1


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("job_started", "running"),
        ("paused", "paused"),
        ("resumed", "running"),
        ("cancelled", "cancelled"),
        ("failed", "failed"),
        ("succeeded", "succeeded"),
        ("checkpoint", "queued"),
        ("something_new", "queued"),
    ],
)
def test_apply_then_the_event_sets_the_state(kind: str, state: str) -> None:
    run = RunProgress([("a", 50)])
    run.apply(kind, {"job": "a"})
    assert run.jobs["a"].state == state


def test_apply_when_the_job_is_new_then_it_is_added() -> None:
    run = RunProgress([])
    run.apply("job_started", {"job": "late", "num_steps": 7})
    assert run.jobs["late"].num_steps == 7


def test_fill_then_it_is_tokens_over_rows_of_all_microbatches() -> None:
    run = RunProgress([])
    assert run.fill is None
    run.apply("microbatch", {"tokens": 100, "rows": 200, "seconds": 0.1})
    run.apply("microbatch", {"job": "a, b", "tokens": 200, "rows": 200, "seconds": 0.1})
    assert run.fill == pytest.approx(0.75)
    assert run.jobs == {}


def test_apply_when_a_job_is_resumed_then_it_stands_where_it_was() -> None:
    run = RunProgress([("a", 50)])
    run.apply("job_started", {"job": "a", "step": 30, "num_steps": 50})
    assert run.jobs["a"].step == 30
