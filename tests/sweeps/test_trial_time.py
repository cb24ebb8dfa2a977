"""Every span of an engine's timeline is somebody's time, once."""

from __future__ import annotations

import time

import pytest

from weft.engine.timeline import TimelineRecorder
from weft.sweeps.trial_loop import TrialTime
from weft.sweeps.trials_file import Trial


def test_shares_when_a_microbatch_is_recorded_after_what_began_later_then_counts_once():
    """A microbatch that was started ahead is recorded when it is counted: after a checkpoint that began later."""
    timeline, trials = TimelineRecorder(), {name: Trial(i, name, {}) for i, name in enumerate("ab")}
    shares = TrialTime(timeline)
    now_s = time.perf_counter()
    timeline.add("forward_backward", 2.0, now_s, jobs={"a": 30, "b": 10})
    shares.catch_up(trials)
    timeline.add("checkpoint", 1.0, now_s + 4.0, jobs={"a": 0})
    shares.catch_up(trials)
    timeline.add("forward_backward", 4.0, now_s + 4.5, jobs={"a": 10, "b": 10})
    timeline.add("plan", 0.1, now_s + 4.6)
    for _ in range(2):
        shares.catch_up(trials)
    assert (shares.training_s, shares.training_tokens) == (pytest.approx(6.0), 60)
    assert trials["a"].seconds == pytest.approx(1.5 + 1.0 + 2.0)
    assert trials["b"].seconds == pytest.approx(0.5 + 2.0)
