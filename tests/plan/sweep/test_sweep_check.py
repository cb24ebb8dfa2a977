"""The checker finds every fault that is planted in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sweep_cases import SHAPE, device

from benchmarks.sweeps.plan_check import violations
from weft.plan.sweep import Configuration, SweepPlan, plan_sweep

SWEEP = [Configuration(f"c{i}", 256, 1, 10 + i, 100) for i in range(8)]


@pytest.fixture
def plan() -> SweepPlan:
    return plan_sweep(SWEEP, SHAPE, device(25), 2)


def with_pack(plan: SweepPlan, **changes: object) -> SweepPlan:
    return replace(plan, packs=(replace(plan.packs[0], **changes), *plan.packs[1:]))


def test_violations_when_nothing_is_wrong_then_none(plan):
    assert len(plan.packs) > 2
    assert violations(plan, SWEEP) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"configurations": ("c0", "other")}, "other is in a pack and not in the sweep"),
        ({"configurations": ()}, "is empty or ends before it starts"),
        ({"end_s": 0.0}, "is empty or ends before it starts"),
        ({"gpus": (2,)}, "has the GPUs (2,); there are 0 to 1"),
        ({"gpus": ()}, "has the GPUs ()"),
        ({"gpus": (0, 0)}, "has the GPUs (0, 0)"),
        ({"gpu_bytes": 10**12}, "needs 1,000,000,000,000 bytes"),
        ({"capacity": 99}, "microbatches of 99 rows and a sample of 100 tokens"),
        ({"end_s": 1e6}, "is in two packs at once"),
        ({"gpus": (0, 1)}, "is in two packs at once"),
    ],
)
def test_violations_when_a_pack_is_wrong_then_names_it_and_the_problem(plan, changes, text):
    assert text in " ".join(violations(with_pack(plan, **changes), SWEEP))


def test_violations_when_a_configuration_is_missing_or_twice_then_reports_it(plan):
    fewer, more = replace(plan, packs=plan.packs[1:]), replace(plan, packs=(*plan.packs, plan.packs[0]))
    name = plan.packs[0].configurations[0]
    assert f"{name} is in 0 packs; it belongs in one." in violations(fewer, SWEEP)
    assert f"{name} is in 2 packs; it belongs in one." in violations(more, SWEEP)


def test_violations_when_the_bound_is_above_the_makespan_then_reports_it(plan):
    wrong = replace(plan, lower_bound_s=2 * plan.makespan_s)
    assert "is below the lower bound" in " ".join(violations(wrong, SWEEP))
