"""`python -m benchmarks curve`: the comparisons hold on the CPU, through the reference kernels."""

from __future__ import annotations

import pytest
import torch

from benchmarks import curve
from benchmarks.curve import measure_curves


@pytest.mark.slow
def test_curves_when_measured_on_a_cpu_then_agree_with_peft_and_with_the_job_alone(monkeypatch):
    monkeypatch.setattr(curve, "SKILLS", ("reverse", "shout"))
    monkeypatch.setattr(curve, "NUM_SEEDS", 1)
    lines: list[str] = []
    figures = {found.key: found for found in measure_curves(torch.device("cpu"), 3, "fused", lines.append)}
    assert figures["curve_vs_peft"].value < 1e-5
    assert figures["curve_bits"].value == 0
    assert abs(figures["curve_fp8_eval"].value) < 0.05
    assert figures["curve_fp8_eval"].value != 0, "FP8 changed nothing"
    assert len(lines) == 4
