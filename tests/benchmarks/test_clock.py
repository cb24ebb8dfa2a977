"""What is compared is timed in turn."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.clock import in_turn_s
from weft.kernels.device_event import median_s

CPU = torch.device("cpu")


def test_works_when_timed_in_turn_then_each_has_its_turns_and_the_first_round_does_not_count(monkeypatch):
    done: list[str] = []
    now = [0.0]

    def work(name: str, *seconds: float) -> None:
        done.append(name)
        now[0] += seconds[min(done.count(name), len(seconds)) - 1]

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    # A turn lasts 4 s: two of the first work, four of the second. Both are slow at first, the first once later as well.
    works = [lambda: work("a", 2, 90, 90, 2, 2, 3, 3, 4), lambda: work("b", 1, 50, 50, 50, 50, 1)]
    assert in_turn_s(works, CPU, rounds=3, turn_s=4.0) == [pytest.approx(3.0), pytest.approx(1.0)]
    assert "".join(done) == "ab" + "aabbbb" * 4


def test_works_when_they_warm_up_first_then_that_is_not_timed(monkeypatch):
    """Each turn: one second untimed at the pace of the work before, then two at its own."""
    done: list[str] = []
    now = [0.0]

    def work(name: str) -> None:
        is_new = not done or done[-1] != name
        done.append(name)
        now[0] += 7.0 if is_new and len(done) > 2 else 1.0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    works = [lambda: work("a"), lambda: work("b")]
    assert in_turn_s(works, CPU, rounds=2, turn_s=2.0, warm_up_s=1.0) == [pytest.approx(1.0), pytest.approx(1.0)]
    assert "".join(done) == "ab" + "aaabbb" * 3


def test_median_when_steps_are_timed_in_a_row_then_is_that_of_one(monkeypatch):
    """After the warm-up and one look, each time takes as many as fill the time."""
    seconds = iter([9.0, 9.0, 0.5, *[0.5] * 4, *[2.0] * 4, *[1.0] * 4])
    now = [0.0]

    def work() -> None:
        now[0] += next(seconds)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert median_s(work, CPU, warmups=2, repeats=3, in_a_row_s=2.0) == pytest.approx(1.0)
    assert next(seconds, None) is None
