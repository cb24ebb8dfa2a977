"""The planning figures of sweeps have their names, and meet the targets that are met."""

from __future__ import annotations

import pytest

from benchmarks.sweeps.parts import QWEN25, TARGETS, batch8, measure_sweep_plan, paper_space


def test_paper_space_when_made_then_has_120_configurations_of_table_1():
    space = paper_space()
    assert len({c.name for c in space}) == 120
    assert {c.batch_size for c in space} == {1, 2, 4, 8, 16, 32}
    assert {c.rank for c in space} == {8, 16, 32, 64, 128}
    assert {c.num_tokens for c in space} == {4096 * 1024}


@pytest.mark.slow
def test_measure_sweep_plan_when_run_on_7b_then_plans_fast_and_near_the_bound():
    figures = measure_sweep_plan(("7b",), with_published=False)
    assert figures["plan120_s"] < 20
    assert 1 <= figures["approximation_ratio"] <= 1.05
    assert 1 < figures["sim_makespan_7b"] < figures["sim_ceiling_7b"]
    by_length = [figures[f"sim_makespan_7b{task}"] for task in ("", "_gsm8k", "_rte", "_sst2")]
    assert by_length == sorted(by_length)
    assert {key for key in TARGETS if "7b" in key} <= figures.keys()


def test_batch8_when_samples_are_long_then_a_step_takes_eight_times_as_long_and_when_short_no_longer():
    """What a sample adds to a step is the GPU's time; below that the host's launches set the pace."""
    assert 7 < batch8(QWEN25["7b"], 4096, 4096) <= 8
    assert batch8(QWEN25["7b"], 16, 16) == 1
    assert 1 < batch8(QWEN25["7b"], 152, 434) < 2
