"""The figures of `python -m benchmarks deploy` have their names and lie where they must."""

from __future__ import annotations

import pytest

from benchmarks.deploy.parts import PARTS, TARGETS, measure_dispatch, measure_plans
from benchmarks.deploy.saving import measure_7b


def test_measure_plans_when_run_then_has_times_gaps_and_the_published_example():
    found = measure_plans((16,))
    assert set(found) == {"plan16_s", "plan16_gap", "plan16_complete", "figure4_step_s"}
    assert (
        found["plan16_gap"] < 0.02
        and found["plan16_complete"] == 1
        and found["figure4_step_s"] == pytest.approx(14.829, abs=1e-3)
    )


def test_measure_dispatch_when_run_then_steps_are_near_their_bound():
    found = measure_dispatch(num_batches=2)
    assert set(found) == {"dispatch_ms", "dispatch_cpu_ms", "dispatch_gap"} and 0 <= found["dispatch_gap"] < 0.1


def test_measure_7b_when_techniques_are_added_then_each_saves_more():
    found = measure_7b(num_steps=2)
    length, balanced, bucketing = (found[f"saving_7b_{name}"] for name in ("length", "balanced", "bucketing"))
    assert length < balanced < bucketing < 1


def test_targets_when_listed_then_every_part_is_there():
    wanted = {"plan64_s", "plan256_s", "plan1024_s", "dispatch_ms", "gpu_seconds_saving", "htask64_s"}
    assert wanted <= set(TARGETS) and len(PARTS) == 5
