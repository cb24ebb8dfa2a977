"""PLoRA's planner as printed: its number of solver calls, its bound, packs that are the best in its sense."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from sweep_cases import PEER, SHAPE, device, sweeps

from benchmarks.sweeps.plan_check import violations
from benchmarks.sweeps.published import JobPlanner, PackProgram, Throughput, plan_published, tail_bound
from weft.plan.sweep import Configuration, plan_sweep
from weft.plan.sweep.cost import PackCost, SweepSetting

pytestmark = pytest.mark.slow
"""It is what Weft's planner is measured against."""
MANY = [Configuration(f"c{i}", 16 << i % 3, 1 << i % 2, 10, 100) for i in range(1200)]


@pytest.mark.parametrize(("gpus", "calls"), list(enumerate((1, 3, 6, 12, 22, 40, 71, 127), start=1)))
def test_dtm_when_configurations_never_run_out_then_calls_the_solver_as_often_as_printed(gpus, calls):
    planner = JobPlanner(PackCost(MANY, SweepSetting(SHAPE, device(11), gpus)))
    kinds = planner.cost.kind_of
    left = tuple(kinds.count(kind) for kind in range(len(planner.cost.kinds)))
    policy = planner.dtm(gpus, left)
    assert planner.throughput.calls == calls
    assert sum(pack.degree for pack in policy) == gpus
    assert planner.throughput.solves <= calls


def test_tail_bound_when_computed_by_hand_then_as_in_the_theorem():
    assert tail_bound(100.0, 20.0, 2, 8) == pytest.approx(100 / (100 - 20 * 6 / 8))
    assert tail_bound(100.0, 20.0, 8, 8) == 1.0


@settings(max_examples=15, deadline=None)
@given(sweeps(most=6, most_gpus=2))
def test_throughput_when_every_pack_is_tried_then_none_has_more(case):
    configurations, setting = case
    cost = PackCost(configurations, setting)
    throughput = Throughput(cost)
    left = tuple(cost.kind_of.count(kind) for kind in range(len(cost.kinds)))
    for degree in setting.degrees:
        way = throughput.ways[degree]
        program = PackProgram(cost, way, range(len(left)), left)
        best = 0.0
        for counts in itertools.product(*(range(n + 1) for n in left)):
            kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
            if kinds and cost.gpu_bytes(kinds, cost.ways[way]) <= setting.usable_bytes:
                best = max(best, program.rate(np.array(counts)))
        found = throughput(degree, left)
        assert (found is None) == (best == 0.0)
        if found is not None:
            assert program.rate(np.array(found.counts)) == pytest.approx(best, rel=1e-6)


@settings(max_examples=10, deadline=None)
@given(sweeps(most=8, most_gpus=4))
def test_published_when_any_sweep_then_the_plan_is_valid(case):
    configurations, setting = case
    found = plan_published(configurations, setting.shape, setting.hardware, setting.num_gpus)
    assert violations(found.plan, configurations) == []
    assert found.plan.approximation_ratio >= 1 - 1e-9
    assert found.tail_bound >= 1
    assert found.solves <= found.solver_calls


def test_published_when_batches_are_small_then_ours_is_shorter():
    sweep = [Configuration(f"b{b}r{r}", r, b, 256 // b, 152, 434) for b in (1, 2, 4, 8) for r in (8, 32, 128)]
    theirs = plan_published(sweep, PEER, "a100-40", 4).plan
    ours = plan_sweep(sweep, PEER, "a100-40", 4)
    assert ours.makespan_s < theirs.makespan_s
    assert ours.lower_bound_s == theirs.lower_bound_s
