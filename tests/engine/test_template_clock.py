"""A run whose chat template writes the date, resumed on another day or with another template."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from weft.engine.resume import check_same_inputs
from weft.engine.train import PreparedRun, clock_of, execute_run, prepare_run
from weft.errors import CheckpointError, DataError
from weft.spec import JobSpec, RunSpec
from weft.store.run_dir import RunDirectory

DATED = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }};{% endfor %}"
BEGAN = datetime.datetime(2001, 2, 3, 23, 59, 58)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "hi", "completion": "you"}) + "\n")
    job = JobSpec(name="job", train_data=("train.jsonl",), chat_template=DATED, max_steps=1, save_steps=1)
    return RunSpec("tiny", (job,), device="cpu")


def begun(spec: RunSpec, tmp_path: Path) -> PreparedRun:
    run = prepare_run(spec, base_dir=tmp_path, clock=BEGAN)
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        execute_run(run, directory, on_event=lambda _: None)
    return run


def test_run_when_resumed_on_another_day_then_meets_the_day_it_began(spec: RunSpec, tmp_path: Path):
    """The record keeps the time, and with it a resumed run has the same tokens."""
    first = begun(spec, tmp_path)
    with RunDirectory.open(tmp_path / "run", resume=True) as directory:
        assert clock_of(directory.read_run()) == BEGAN
        again = prepare_run(spec, base_dir=tmp_path, clock=clock_of(directory.read_run()))
        check_same_inputs(again, directory)
    assert again.data["job"].train.fingerprint == first.data["job"].train.fingerprint
    text = first.engine.executor.tokenizer.decode(first.data["job"].train.samples[0].tokens)  # type: ignore[attr-defined]
    assert "2001-02-03" in text


def test_run_when_the_template_changed_since_then_the_error_reports_it(spec: RunSpec, tmp_path: Path):
    """Other tokens by another template are not called other data."""
    run = begun(spec, tmp_path)
    other = prepare_run(spec, base_dir=tmp_path, clock=BEGAN + datetime.timedelta(days=1))
    with RunDirectory.open(tmp_path / "run", resume=True) as directory:
        with pytest.raises(DataError, match=r"^job: train_data is not what the checkpoint was trained on"):
            check_same_inputs(other, directory)
        other.engine.executor.tokenizer.chat_template = "{{ messages }}"  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=r"the base model has changed since the run began \(chat template\)"):
            check_same_inputs(other, directory)
        check_same_inputs(run, directory)
