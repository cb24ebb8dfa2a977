"""The figures of admission and cluster replay have their names and lie where they must."""

from __future__ import annotations

import pytest

from benchmarks.planning.cluster import WAYS, measure_replay, plan_share


def test_measure_replay_when_run_then_gives_the_figures_of_every_way():
    figures = measure_replay(horizon_s=3600)
    assert 0 < figures["replay_week_s"] < 30
    for way in WAYS:
        assert figures[f"replay_{way}_tokens_s"] > 0 and figures[f"replay_{way}_jct_p95_s"] > 0
        assert 0 < figures[f"replay_{way}_utilisation"] <= 1 and 0 < figures[f"replay_{way}_fairness"] <= 1
    ratio = figures["replay_weft_tokens_s"] / figures["replay_peft_tokens_s"]
    assert figures["replay_weft_over_peft"] == pytest.approx(ratio)


@pytest.mark.slow
def test_plan_share_when_an_engine_has_run_then_planning_took_little_of_its_time():
    figures = plan_share(num_steps=2)
    assert 0 < figures["plan_share_of_step"] < 0.02
    assert figures["plan_share_ahead"] >= 0 and figures["pace_mape"] == 0, "too short a run to learn from"
