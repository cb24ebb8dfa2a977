"""`weft tune --jobs`."""

from __future__ import annotations

from pathlib import Path

import pytest

JOBS = """
base_model: tiny
capacity: 64
defaults: {max_steps: 4, global_batch_size: 1, max_length: 64}
jobs:
  - {name: a, train_data: rows.jsonl, adapter: {r: 2}}
"""


@pytest.fixture
def jobs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_TUNING", str(tmp_path / "tuning.json"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (tmp_path / "jobs.yaml").write_text(JOBS)
    return tmp_path / "jobs.yaml"


@pytest.mark.slow
def test_tune_when_given_jobs_then_measures_shows_and_remembers(weft, jobs_file):
    """Capacities of 64 and 128 on one device and, as requested, two stages; the second time nothing is trained."""
    first = weft("tune", "--jobs", jobs_file, "--steps", 1, "--layout", "stages:2")
    assert first.code == 0, first
    assert "one device, capacity 64: " in first.out and "stages:2, capacity 128: " in first.out
    assert "against now" in first.out and "measured before" not in first.out
    assert "put into" in first.out or "nothing is clearly faster" in first.out
    assert not (jobs_file.parent / "runs").exists()
    second = weft("tune", "--jobs", jobs_file, "--steps", 1, "--layout", "stages:2")
    assert second.out.count("(measured before)") == 4


def test_tune_when_options_make_no_sense_together_then_refused(refused, jobs_file):
    assert "leave it out with --jobs" in refused("tune", "--jobs", jobs_file, "--rows", 64)
    assert "give --jobs FILE too" in refused("tune", "capacity=512")
    assert "--layout" in refused("tune", "--jobs", jobs_file, "--layout", "stages:99")
    assert "no/such.yaml" in refused("tune", "--jobs", "no/such.yaml")


def test_tune_when_the_data_is_not_there_then_reported_before_any_trial(refused, jobs_file):
    (jobs_file.parent / "rows.jsonl").unlink()
    assert "rows.jsonl" in refused("tune", "--jobs", jobs_file)
