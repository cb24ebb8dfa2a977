"""`weft tune`: keeps the fastest launch that gives the same bits, and none that does not."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from weft.cli.main import app
from weft.kernels import tuner, tuning
from weft.kernels.lora import weight_grad
from weft.kernels.tuner import compile_ahead, compile_some, runs_of, tune
from weft.plan.cost.shape import SHAPES

CPU = torch.device("cpu")
SLOW, FAST, WRONG = ({"num_warps": 4, "num_stages": n} for n in (2, 3, 4))


@pytest.mark.parametrize("operation", ["shrink", "shrink_grad", "weight_grad", "expand", "expand_grad"])
def test_operations_when_run_twice_then_write_the_same_finite_numbers(operation, monkeypatch):
    """What is compared between candidates depends on nothing but the launch."""
    monkeypatch.setattr(weight_grad, "NUM_PROGRAMS", 4)  # hundreds would have nothing to do
    run = runs_of("16", SHAPES["tiny"], 96, torch.float32, CPU)[operation]
    one, other = run(), run()
    assert all(torch.equal(a, b) and a.isfinite().all() and a.any() for a, b in zip(one, other, strict=True))


def test_runs_when_made_then_hold_layers_with_and_without_dropout(monkeypatch):
    made: list[float] = []
    monkeypatch.setattr(tuner, "make_layer", lambda shape, rank, dropout, *rest: made.append(dropout) or dropout)
    monkeypatch.setattr(tuner, "operations", lambda layer: {"shrink": lambda: [torch.tensor(layer)]})
    runs = runs_of("16", SHAPES["tiny"], 96, torch.float32, CPU)
    assert made == [0.0, 0.1] and torch.stack(runs["shrink"]()).tolist() == pytest.approx([0.0, 0.1])


def test_trying_when_the_compiler_complains_then_nothing_is_shown(capsys):
    with tuner.trying_quietly("shrink/16", SLOW):
        print("thousands of lines of assembler")
    assert not capsys.readouterr().out and not tuning.TRYING


def test_tune_when_candidates_differ_then_keeps_the_fastest_right_one(monkeypatch):
    layers = {"shrink": lambda: [torch.tensor([1.0 + (tuning.TRYING.get("shrink/16") == WRONG)])]}
    monkeypatch.setattr(tuner, "RANKS", {"16": 16})
    monkeypatch.setattr(tuner, "operations", lambda layer: layers)
    monkeypatch.setattr(tuner, "candidates", lambda key: [SLOW, FAST, WRONG])
    seconds = {2: 2e-3, 3: 0.5e-3, 4: 0.1e-3, None: 1e-3}
    monkeypatch.setattr(
        tuner,
        "_seconds",
        lambda run, device: seconds[tuning.TRYING.get("shrink/16", {}).get("num_stages")],
    )
    lines: list[str] = []
    assert tune(SHAPES["tiny"], 96, torch.float32, CPU, lines.append) == {"shrink/16": FAST}
    assert "50% of the time" in lines[0] and "1 candidates gave other bits" in lines[0]


def test_compiling_when_shared_out_then_every_candidate_is_launched_once(monkeypatch):
    seen: list[tuple[str, tuple[tuple[str, int], ...]]] = []

    def run() -> list[torch.Tensor]:
        seen.extend((key, tuple(choice.items())) for key, choice in tuning.TRYING.items())
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(tuner, "operations", lambda layer: {"shrink": run, "expand": run})
    for turn in range(3):
        compile_some("64", turn, 3, SHAPES["tiny"], torch.float32, CPU)
    keys = ("shrink/64", "expand/64")
    assert sorted(seen) == sorted((key, tuple(choice.items())) for key in keys for choice in tuning.candidates(key))
    assert not tuning.TRYING


def test_compiling_when_a_process_fails_then_reports_it(monkeypatch):
    """What is left out is a candidate, not an error of the whole: a layer that cannot be made is one."""
    monkeypatch.setattr(tuner, "RANKS", {"16": 16})
    monkeypatch.setattr(tuner, "MOST_PROCESSES", 1)
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        compile_ahead(SHAPES["tiny"], torch.float32, torch.device("cuda:99"))


def test_verb_when_there_is_no_gpu_then_reports_it_and_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_TUNING", str(tmp_path / "tuning.json"))
    done = CliRunner().invoke(app, ["tune"])
    assert done.exit_code != 0 and not list(tmp_path.iterdir())
