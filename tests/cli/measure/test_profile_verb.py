"""`weft profile`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.planning import parts as plan_cost
from weft.model.load import build
from weft.model.source import TINY
from weft.plan.cost.profile import load_profile
from weft.plan.cost.shape import SHAPES


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model directory smaller than the embedded one."""
    model = build(SHAPES["tiny"], torch.float32, torch.device("cpu"), "sdpa")
    model.save_pretrained(tmp_path / "small")
    for file in Path(TINY).glob("*token*"):
        shutil.copy(file, tmp_path / "small")
    return tmp_path / "small"


def test_profile_when_run_on_a_cpu_then_measures_checks_and_keeps(weft, tmp_path, small):
    out = tmp_path / "cpu.json"
    result = weft("profile", "--model", small, "--capacity", 256, "--quick", "--out", out)
    assert result.code == 0, result
    assert "kernels reference" in result.out
    assert "memory_mape = " in result.out and "on 6 shapes that were not fitted" in result.out
    kept = load_profile(out)
    assert kept.setup.model == str(small)
    figures = plan_cost.measure_cost(profile=out)
    assert figures["memory_mape"] == kept.errors["peak_bytes"].mape < 0.03
    assert f"memory_mape = {figures['memory_mape']:.3%}" in result.out
    assert figures["step_time_mape"] == kept.time_error.mape and figures["padded_time_mape"] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--capacity", 8), "--capacity: got 8; at least 128 tokens."),
        (("--out", "gone/p.json"), "--out gone/p.json: there is no directory gone."),
        (("--out", "/proc/p.json"), "/proc: there is no such directory."),
        (("--model", "llama-3.1-8b"), "--model: the shape llama-3.1-8b is measured on a CUDA GPU, and none is used"),
        (("--model", "llama"), "base_model llama: there is no such model directory"),
        (("--quantize", "fp4"), "got 'fp4'; accepted are none, fp8, nf4, int8"),
        (("--recompute", "mlp"), "recompute: needs the fused kernels; this run has kernels reference"),
    ],
)
def test_profile_when_it_cannot_run_then_refused_with_the_reason(words, sentence, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused("profile", *words)
