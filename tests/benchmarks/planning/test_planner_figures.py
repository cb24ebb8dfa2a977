"""The planners' table reports what it names, and groups pay by the price of a further job."""

from __future__ import annotations

import pytest

from benchmarks.pipeline.four_jobs import MIXES, NUM_STAGES, split_cost
from benchmarks.planning import planners
from benchmarks.planning.groups import choose, measure_job_share
from benchmarks.planning.planners import PARTS, TARGETS, measure_planning
from weft.plan.simulate.choose import FastestPipeline
from weft.spec.run import PLANNERS


def test_measure_planning_when_small_then_has_every_planner_and_exact_needs_fewest():
    found = measure_planning(MIXES[0], 128)
    assert found.keys() <= TARGETS.keys() and len(found) == 3 * len(PLANNERS)
    assert found["xsum_exact_num"] == min(found[f"xsum_{name}_num"] for name in PLANNERS)
    assert all(0 <= found[f"xsum_{name}_empty"] < 1 for name in PLANNERS)
    assert len(PARTS) == 2 * len(MIXES) + 3


def test_staged_when_named_then_the_planners_are_those_of_stages():
    found = planners.staged(split_cost())
    assert set(found) < set(PLANNERS) and isinstance(found["auto"], FastestPipeline)
    assert found["lorafusion"].packer.num_stages == NUM_STAGES


@pytest.mark.parametrize(("share", "is_several"), [(0.0001, False), (0.03, True)])
def test_choose_when_a_further_job_costs_more_then_jobs_are_in_several_groups(share, is_several):
    choice = choose(MIXES[0], 8, 4, 2, share)
    assert (len(choice.groups) > 1) is is_several


@pytest.mark.slow
def test_measure_when_on_a_cpu_then_every_planner_trains():
    assert all(rate > 0 for rate in planners.measure_cpu(MIXES[0], 1, 1).values())
    assert measure_job_share()["job_share_h200"] < 0.001
