"""Stages as streams of one device: the bench that an 8B shape runs on a GPU, on a tiny one and a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.pipeline.gpu_costs import measure_free_sums
from benchmarks.pipeline.one_gpu import OneDevice, measure_stages, time_in_turn
from benchmarks.pipeline.parts import TARGETS
from weft.parallel.stages import stage_runner
from weft.plan.cost.shape import find_shape

TINY = OneDevice(replace(find_shape("tiny"), layers=4), torch.float32, torch.device("cpu"), 64, rounds=1)


@pytest.mark.slow
def test_stages_when_measured_on_a_tiny_shape_then_no_bit_differs_and_every_figure_is_there():
    found = measure_stages(TINY)
    assert found["bits_stages"] == 0
    assert found.keys() == {"bits_stages", "stage_sum", "stage_sim"} <= TARGETS.keys()
    assert all(0 <= value < 100 for value in found.values())


def test_stages_when_one_changes_what_it_hands_on_then_the_gradients_count_it(monkeypatch):
    own = stage_runner.FusedStageRunner._own
    monkeypatch.setattr(stage_runner.FusedStageRunner, "_own", staticmethod(lambda *given: own(*given).mul_(1 + 1e-6)))
    times = time_in_turn(TINY, TINY.backbone(), TINY.stages(2))
    assert times.num_differing > 0
    assert times.sum_s == pytest.approx(sum(times.pass_s(name, s) for name in ("forward", "backward") for s in (0, 1)))


@pytest.mark.slow
def test_free_sums_when_measured_on_a_tiny_shape_then_no_order_changes_a_bit():
    found = measure_free_sums(TINY)
    assert found["free_sums_bits"] == 0
    assert found.keys() == {"free_sums_cost", "free_sums_bits"} <= TARGETS.keys()
