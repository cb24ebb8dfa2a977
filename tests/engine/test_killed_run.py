"""`kill -9` at any moment, again and again: the run still ends with the files of one that was left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_model import small_model

SCRIPT = Path(__file__).parent / "killed_run.py"
JOBS = ("upper", "lower", "double")


def lines(path: Path) -> list[dict]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in ("time", "eval_runtime")} for record in records]


@pytest.mark.faults
def test_run_when_killed_at_random_moments_then_ends_as_if_it_never_was(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "4", str(small_model())]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False, env=one_thread)
    assert finished.returncode == 0, finished.stderr
    ends = json.loads(finished.stdout)
    assert ends[-1] == "done", finished.stderr
    assert ends.count("killed") == len(ends) - 1 >= 8
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for job in JOBS:
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            written = (killed / job / "adapter" / name).read_bytes()
            assert written == (undisturbed / job / "adapter" / name).read_bytes(), (job, name)
        assert lines(killed / job / "metrics.jsonl") == lines(undisturbed / job / "metrics.jsonl")
        assert json.loads((killed / job / "status.json").read_text())["state"] == "succeeded"
    assert json.loads((killed / "lower" / "status.json").read_text())["early_stopped"]
    assert not list(killed.rglob(".tmp-weft-*"))
