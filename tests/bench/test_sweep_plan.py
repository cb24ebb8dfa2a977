"""The planning figures of sweeps have their names, and meet the targets that are met."""

from __future__ import annotations

from weft.bench.sweep import TARGETS
from weft.bench.sweep_plan import measure_sweep_plan, paper_space


def test_paper_space_when_made_then_has_120_configurations_of_table_1():
    space = paper_space()
    assert len({c.name for c in space}) == 120
    assert {c.batch_size for c in space} == {1, 2, 4, 8, 16, 32}
    assert {c.rank for c in space} == {8, 16, 32, 64, 128}
    assert {c.num_tokens for c in space} == {4096 * 1024}


def test_measure_sweep_plan_when_run_on_7b_then_plans_fast_and_near_the_bound():
    figures = measure_sweep_plan(("7b",), with_published=False)
    assert figures["plan120_s"] < 20
    assert 1 <= figures["approximation_ratio"] <= 1.05
    assert 1 < figures["sim_makespan_7b"] < figures["sim_ceiling_7b"]
    assert figures["sim_makespan_7b"] < figures["sim_makespan_7b_gsm8k"] < figures["sim_makespan_7b_rte"]
    assert {key for key in TARGETS if "7b" in key} <= figures.keys()
