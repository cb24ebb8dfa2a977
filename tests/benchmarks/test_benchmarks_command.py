"""`python -m benchmarks`: what it measures is shown and kept, and a mistake is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS
from benchmarks.replicas import placing
from benchmarks.steps import session
from weft.cli.main import main as weft_main
from weft.errors import ModelError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_bench_step_when_run_on_tiny_then_shows_and_keeps_every_figure(bench, tmp_path):
    kept, drawn = tmp_path / "cpu.json", tmp_path / "cpu.svg"
    kept.write_text('{"linear4_p0": 1.05}')
    result = bench("step", "--model", "tiny", "--quick", "--json", kept, "--plot", drawn)
    assert result.code == 0, result
    found = json.loads(kept.read_text())
    assert found["linear4_p0"] == 1.05
    for name in ("tiny.step_vs_peft", "tiny.sweep4", "tiny.overhead2", "tiny.bits_differing"):
        assert f"{name} = " in result.out
        assert name in found
    assert found["tiny.bits_differing"] == 0
    ratio = found["tiny.weft_4_of_32_tok_s"] / found["tiny.peft_solo_32_tok_s"]
    assert found["tiny.sweep4"] == pytest.approx(ratio, rel=1e-2)
    assert "<svg" in drawn.read_text()


@pytest.mark.usefixtures("no_gpu")
def test_bench_step_when_a_regime_is_named_then_measures_what_it_needs(bench):
    result = bench("step", "--model", "tiny", "--regime", "tiny.overhead2", "--quick", "--kernels", "fused")
    assert result.code == 0
    assert "kernels fused: plain torch" in result.out
    assert "tiny.overhead2 = " in result.out
    assert "peft" not in result.out


@pytest.mark.usefixtures("no_gpu")
def test_bench_step_when_a_run_fails_then_others_go_on_and_the_exit_reports_it(bench, tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise ModelError("is broken.")

    monkeypatch.setattr(session, "make_backbone", broken)
    kept = tmp_path / "cpu.json"
    result = bench("step", "--model", "tiny", "--regime", "tiny.sweep4", "--quick", "--json", kept)
    assert result.code == 1
    assert "a backbone of tiny (none) failed: ModelError: is broken." in result.out
    assert "tiny.sweep4 was not measured" in result.out
    assert json.loads(kept.read_text())["tiny.peft_solo_32_tok_s"] > 0


def test_bench_replicas_when_run_then_shows_its_figures_and_keeps_them(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "REPEATS", 1)
    monkeypatch.setattr(placing, "trials_speedup", lambda _: 7.7)
    kept = tmp_path / "replicas.json"
    kept.write_text('{"scale2_cpu": 1.9}')
    result = bench("replicas", "--regime", "place_1000_s", "--regime", "sim8", "--json", kept)
    assert result.code == 0, result
    assert "8 GPUs, simulated" in result.out and "sim8 = 7.70x (target ≥ 7.60x, met)" in result.out
    found = json.loads(kept.read_text())
    assert found["sim8_jobs"] > found["sim8"] == 7.7
    assert found["place_1000_s"] > 0
    assert found["scale2_cpu"] == 1.9


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("step",), "benchmarks: these measurements need a CUDA GPU and torch sees none"),
        (("step", "--model", "llama-3.1-8b"), "benchmarks: these measurements need a CUDA GPU"),
        (("kernels",), "benchmarks: these measurements need a CUDA GPU"),
        (("step", "--model", "llama-3.1-8c"), "Did you mean llama-3.1-8b?"),
        (("step", "--model", "tiny", "--regime", "tiny.sweep5"), "Did you mean tiny.sweep4?"),
        (
            ("step", "--model", "tiny", "--kernels", "fast"),
            "got 'fast'; accepted are auto, fused, reference.",
        ),
        (("step", "--model", "tiny", "--plot", "a.pdf"), "--plot: got a.pdf; the name must end in .svg or .png."),
        (("step", "--model", "tiny", "--json", "gone/a.json"), "--json gone/a.json: there is no directory gone."),
        (("replicas", "--json", "gone/a.json"), "--json gone/a.json: there is no directory gone."),
        (("replicas", "--regime", "sim9"), "--regime: got 'sim9'; accepted are place_1000_s, sim8, scale2_cpu"),
        (("replicas", "--regime", "bits_two_ranks"), "--regime: bits_two_ranks needs a CUDA GPU and torch sees none."),
        (("wall", "--rows", "0"), "--rows: must be at least 1, got 0."),
        (("kernels", "--regime", "linear4"), "there is no figure 'linear4'; accepted are linear4_p0"),
    ],
)
def test_bench_when_it_cannot_run_then_refused_with_the_reason(words, sentence, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(*words)


def test_bench_when_peft_is_not_installed_then_reports_it_before_any_work(refused, monkeypatch):
    monkeypatch.setattr("benchmarks.steps.peers.importlib.util.find_spec", lambda name: None)
    assert "PEFT, which Weft is measured beside, is not installed. Install it: pip" in refused(
        "step", "--model", "tiny"
    )


def test_module_when_run_then_lists_every_benchmark_and_each_can_be_imported(bench):
    found = subprocess.run([sys.executable, "-m", "benchmarks", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    listed = [line.split()[0] for line in found.stdout.splitlines() if line.startswith("  ") and line[2] != " "]
    assert set(BENCHMARKS) <= set(listed)
    for name in BENCHMARKS:
        assert bench(name, "--help").code == 0


@pytest.mark.parametrize("words", [("step", "--model", "tiny"), ("--help",), ()])
def test_weft_bench_when_typed_then_one_sentence_names_the_command(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["weft", "bench", *words])
    with pytest.raises(SystemExit) as ended:
        weft_main()
    assert ended.value.code == 2
    command = " ".join(["python -m benchmarks", *words])
    assert capsys.readouterr().err == (f"error: weft bench: is no verb any more; in the repository, run `{command}`.\n")
