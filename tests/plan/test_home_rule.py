"""Where jobs are at home that have one replica: one rule, of plans and of runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from weft.plan.level import LEAST_GAIN, choose_homes

LEVEL = {"a": (60.0, 60.0), "b": (50.0, 50.0), "c": (40.0, 40.0), "d": (30.0, 30.0)}


def end_of(seconds: Mapping[str, Sequence[float]], homes: Mapping[str, int]) -> float:
    """When the last replica ends."""
    return max(sum(seconds[job][k] for job, home in homes.items() if home == k) for k in set(homes.values()))


def test_homes_when_all_are_tried_then_hardly_any_are_better():
    """On unlike replicas, of which some cannot hold some jobs."""
    rng, ratios = np.random.default_rng(5), []
    for _ in range(60):
        seconds = {}
        for job in "abcdef":
            own = rng.integers(1, 100) / np.array([1.0, 1.0, 1.8])
            own[: rng.integers(0, 3)] = math.inf
            seconds[job] = tuple(own.tolist())
        choices = (dict(zip(seconds, own, strict=True)) for own in itertools.product(range(3), repeat=6))
        best = min(end_of(seconds, homes) for homes in choices)
        ratios.append(end_of(seconds, choose_homes(seconds)) / best)
    assert min(ratios) >= 1 - 1e-9 and np.mean(ratios) < 1.02 and np.mean(np.array(ratios) < 1 + 1e-9) > 0.75


def test_homes_when_jobs_are_new_then_the_longest_go_first():
    """In another order these jobs would need 15 seconds, from which no single change leads to 14."""
    seconds = {f"j{i}": (length,) * 3 for i, length in enumerate((5.0, 3.0, 6.0, 10.0, 7.0, 7.0, 4.0))}
    assert end_of(seconds, choose_homes(seconds)) == 14.0


def test_homes_when_jobs_come_and_go_then_are_level_and_others_stay():
    homes = choose_homes(LEVEL)
    assert end_of(LEVEL, homes) == 90
    assert choose_homes(LEVEL, homes) == homes
    without = {job: own for job, own in LEVEL.items() if job != "a"}
    left = {job: home for job, home in homes.items() if job != "a"}
    assert sum(choose_homes(without, left)[job] != home for job, home in left.items()) <= 1
    arrived = choose_homes({**LEVEL, "new": (80.0, 80.0)}, homes)
    assert {job: arrived[job] for job in homes} == homes or end_of({**LEVEL, "new": (80.0, 80.0)}, arrived) < 170 * 0.9


def test_homes_when_a_move_gains_little_then_only_who_had_none_moves():
    """What moves a job's state must be worth it."""
    seconds = {"a": (10.0, 10.0), "b": (9.0, 9.0), "c": (1.0, 1.0), "d": (1.0, 1.0)}
    poor = {"a": 0, "b": 1, "c": 0, "d": 0}
    assert end_of(seconds, poor) == 12 and end_of(seconds, {**poor, "d": 1}) == 11 > 12 * (1 - LEAST_GAIN)
    assert choose_homes(seconds, poor) == poor
    assert end_of(seconds, choose_homes(seconds)) == 11


@pytest.mark.parametrize("before", [{}, {"a": 0}])
def test_homes_when_a_replica_cannot_hold_a_job_then_it_is_elsewhere(before):
    assert choose_homes({"a": (math.inf, 7.0), "b": (1.0, 1.0)}, before) == {"a": 1, "b": 0}
    assert choose_homes({}) == {}
