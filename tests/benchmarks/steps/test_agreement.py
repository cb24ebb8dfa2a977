"""The comparison of both paths: small where they agree, and large where one of them is wrong."""

from __future__ import annotations

import pytest
import torch

from benchmarks.steps import gradients
from benchmarks.steps.gradients import measure_agreement
from weft.model.fused import layer
from weft.plan.cost.shape import find_shape

CPU = torch.device("cpu")


def test_agreement_when_both_paths_are_right_then_is_rounding():
    lines: list[str] = []
    found = measure_agreement(find_shape("tiny"), torch.float32, CPU, lines.append)
    assert found.value < 1e-4 and found.is_met
    assert len(lines) == 8


@pytest.mark.parametrize("broken", ["expand_grad", pytest.param("weight_grad", marks=pytest.mark.slow)])
def test_agreement_when_a_kernel_is_wrong_then_reports_it(monkeypatch, broken):
    def nothing(out: torch.Tensor, *_: object, adds: bool = True) -> None:
        if not adds:
            out.zero_()

    monkeypatch.setattr(layer, broken, nothing)
    monkeypatch.setattr(gradients, "RANKS", gradients.RANKS[:1])
    found = measure_agreement(find_shape("tiny"), torch.float32, CPU, lambda _: None)
    assert found.value > 0.1 and not found.is_met
