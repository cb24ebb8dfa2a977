"""What is compared is timed in turn."""

from __future__ import annotations

import pytest
import torch

from weft.bench import clock
from weft.bench.clock import in_turn_s

CPU = torch.device("cpu")


def test_works_when_timed_in_turn_then_each_has_its_turns_and_the_first_round_does_not_count(monkeypatch):
    done: list[str] = []
    now = [0.0]

    def work(name: str, *seconds: float) -> None:
        done.append(name)
        now[0] += seconds[min(done.count(name), len(seconds)) - 1]

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    # A turn lasts 4 s: two of the first work, four of the second. Both are slow at first, the first once later as well.
    works = [lambda: work("a", 2, 90, 90, 2, 2, 3, 3, 4), lambda: work("b", 1, 50, 50, 50, 50, 1)]
    assert in_turn_s(works, CPU, rounds=3, turn_s=4.0) == [pytest.approx(3.0), pytest.approx(1.0)]
    assert "".join(done) == "ab" + "aabbbb" * 4
