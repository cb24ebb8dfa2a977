"""Wherever a sweep is killed, it goes on and ends as if nothing had happened: decisions follow from the record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from covering import chosen

import weft
from weft.sweeps import api
from weft.sweeps.trials_file import TrialsFile

ROW = ("rank", "name", "state", "reason", "value", "params", "steps", "total_steps", "tokens", "losses")
ASHA = {"rule": "asha", "factor": 2, "grace": 2, "unit": "steps", "min_trials": 2}
LRS = {"lr": [1e-5, 8e-3, 1e-3, 4e-3, 2e-2, 1e-4, 3e-3], "max_steps": [6, 9]}
RANGE = {"lr": {"min": 1e-4, "max": 2e-2, "log": True}}
SWEEPS: dict[str, dict[str, Any]] = {
    "grid-asha": {"space": LRS, "early_stop": ASHA, "max_jobs": 4},
    "random-median": {"space": RANGE, "trials": 6, "max_jobs": 3, "early_stop": {**ASHA, "rule": "median"}},
    "grid-halving": {"space": {"lr": LRS["lr"][:5]}, "max_jobs": 2, "early_stop": {**ASHA, "rule": "halving"}},
    "random-tokens": {"space": RANGE, "trials": 5, "max_jobs": 2, "max_tokens": 900},
    "halving-tokens": {
        "space": {"lr": LRS["lr"][:5]},
        "max_jobs": 2,
        "early_stop": {**ASHA, "rule": "halving"},
        "max_tokens": 900,
    },
    "tpe-asha": {"space": RANGE, "sampler": "tpe", "trials": 8, "max_jobs": 3, "early_stop": ASHA},
    "nsgaii": {"space": RANGE, "sampler": "nsgaii", "trials": 5, "max_jobs": 2},
    "qmc": {"space": RANGE, "sampler": "qmc", "trials": 5, "max_jobs": 2},
}
EVERY = 13
"""Appends from one kill to the next."""
JOB = {"eval_steps": 2, "save_steps": 2, "adapter": {"r": 2, "dropout": 0.1}}


def results(folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """The leaderboard without its times, and every adapter."""
    board = json.loads((folder / "leaderboard.json").read_text())
    rows = [
        [*(row[key] for key in ROW), [(p["step"], p["tokens"], p["value"]) for p in row["points"]]]
        for row in board["trials"]
    ]
    adapters = sorted(folder.glob("**/adapter_model.safetensors"))
    return rows, {str(path.relative_to(folder)): path.read_bytes() for path in adapters if "judged" not in path.parts}


def keep_copies(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[int], bool]) -> list[Path]:
    """Copies the folder as a killed process would leave it: before an append, and with half of its line."""
    append, copies, calls = TrialsFile._append, [], []

    def copying(self: TrialsFile, line: dict[str, Any]) -> None:
        calls.append(line)
        before = self.path.read_bytes() if self.path.exists() else b""
        if wanted(len(calls)):
            copies.append(Path(f"killed{len(calls)}"))
            shutil.copytree(self.path.parent, copies[-1])
        append(self, line)
        whole = self.path.read_bytes()
        if copies and copies[-1].name == f"killed{len(calls)}" and len(calls) % 2:
            (copies[-1] / self.path.name).write_bytes(whole[: (len(before) + len(whole)) // 2])

    monkeypatch.setattr(TrialsFile, "_append", copying)
    return copies


@pytest.mark.parametrize("name", chosen(SWEEPS, 1, 4, 5))
def test_sweep_when_killed_between_two_appends_then_ends_as_the_unbroken_one(settings, monkeypatch, name):
    """Trials whose checkpoints are at different steps decide nothing else than they would have side by side."""
    monkeypatch.setattr(api, "write_sweep_report", lambda path, board, info, time: None)
    given = settings(**SWEEPS[name], job=JOB)
    with monkeypatch.context() as patch:
        copies = keep_copies(patch, lambda call: call % EVERY == 3)
        weft.sweep(given)
    expected = results(Path("out"))
    assert len(copies) >= 2
    for copy in copies:
        found = weft.sweep({**given, "output_dir": str(copy)}, resume=True)
        assert all(trial.steps for trial in found.trials if trial.value is not None)
        assert results(copy) == expected, copy
