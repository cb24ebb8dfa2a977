"""The figures of admission and cluster replay have their names and lie where they must."""

from __future__ import annotations

from benchmarks.planning.cluster import measure_cluster


def test_measure_cluster_when_run_then_gives_the_figures_of_the_table():
    figures = measure_cluster(horizon_s=3600, num_steps=2)
    assert {"replay_week_s", "plan_share_of_step", "replay_throughput_ratio"} <= figures.keys()
    assert 0 < figures["replay_week_s"] < 30
    assert 0 < figures["plan_share_of_step"] < 0.02
    assert figures["plan_share_ahead"] >= 0 and figures["pace_mape"] == 0, "too short a run to learn from"
    assert figures["replay_shared_tokens_s"] >= figures["replay_single_tokens_s"] > 0
    assert 0 < figures["replay_single_utilisation"] <= figures["replay_shared_utilisation"] <= 1
