"""Runs and sweeps behind a URL, as a user gives one to --out."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from weft.cli.demo import SKILLS
from weft.cli.options import run_location
from weft.engine.events import StepDone
from weft.report.live import LiveTable
from weft.store.mirror import RunUrl

JOBS = """\
base_model: tiny
capacity: 128
defaults: {max_steps: 4, global_batch_size: 2, max_length: 64, adapter: {r: 2}, save_steps: 2}
jobs:
  - {name: shout, train_data: rows.jsonl}
"""
SWEEP = """\
base_model: tiny
capacity: 128
compare_speed: false
job: {train_data: rows.jsonl, eval_data: 2, max_length: 48, max_steps: 2, global_batch_size: 2}
space: {lr: [1e-3, 8e-3], r: [2]}
"""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A location in a store that is still unused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = "".join(json.dumps(row) + "\n" for row in SKILLS["shout"].rows(0, 12))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "jobs.yaml").write_text(JOBS)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return f"memory://{tmp_path.name}/run"


def stored(url: str, name: str) -> bytes:
    return MemoryFileSystem().cat_file(f"{url}/{name}")


def test_train_when_out_is_a_url_then_stop_and_resume_leave_the_bytes_of_a_directory(weft, url, monkeypatch):
    update = LiveTable.update

    def stop_after_three(table, event):
        update(table, event)
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(LiveTable, "update", stop_after_three)
        stopped = weft("train", "jobs.yaml", "--out", url)
    assert stopped.code == 130 and f"go on with: weft train jobs.yaml --out {url} --resume\n" in stopped.out
    assert not list(Path("cache").rglob("*.safetensors")), "nothing is left here"
    done = weft("train", "jobs.yaml", "--out", url, "--resume")
    assert done.code == 0, done.err
    assert f"adapter in {url}/shout/adapter\n" in done.out and f"report    {url}/report.html\n" in done.out
    assert weft("train", "jobs.yaml", "--out", "out").code == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert stored(url, f"shout/adapter/{name}") == Path("out/shout/adapter", name).read_bytes()
    report = weft("report", url)
    assert report.code == 0 and report.out.startswith(f"report    {url}/report.html\n")
    assert json.loads(stored(url, "run.json"))["run_name"] == "run"


def test_sweep_when_out_is_a_url_then_its_best_lies_there_and_resume_finds_it_done(weft, url):
    done = weft("sweep", "sweep.yaml", "--out", url)
    assert done.code == 0, done.err
    assert f"          {url}/best (PEFT adapter and jobs.yaml)\n" in done.out
    assert weft("sweep", "sweep.yaml", "--out", "out").code == 0
    assert stored(url, "best/adapter_model.safetensors") == Path("out/best/adapter_model.safetensors").read_bytes()
    again = weft("sweep", "sweep.yaml", "--out", url, "--resume")
    assert again.code == 0 and "started" not in again.out and "best      t001" in again.out
    assert weft("sweep", "sweep.yaml", "--out", url, "--resume", "--dry-run").code == 0
    assert weft("report", url).code == 0


def test_mistake_when_about_a_url_then_is_one_sentence_and_nothing_is_written(refused, url):
    assert refused("train", "jobs.yaml", "--out", url, "--resume").startswith(f"{url}: there is no run to resume.")
    assert refused("sweep", "sweep.yaml", "--out", url, "--resume").startswith(f"{url}: there is no sweep to resume.")
    assert refused("report", url).startswith(f"{url}: is not a run directory")
    assert refused("train", "jobs.yaml", "--out", "nonsense://x").startswith(
        "--out: 'nonsense://x' is not a file store"
    )
    assert refused("report", "nonsense://x").startswith("PATH: 'nonsense://x' is not a file store")
    for flag in ((), ("--dry-run",)):
        found = refused("train", "jobs.yaml", "output_dir=nonsense://x", *flag)
        assert found.startswith("output_dir=nonsense://x: 'nonsense://x' is not a file store")
    found = refused("sweep", "sweep.yaml", "output_dir=nonsense://x")
    assert found.startswith("output_dir=nonsense://x: 'nonsense://x' is not a file store")
    assert not [path for path in MemoryFileSystem.store if url.removeprefix("memory:/") in path]
    assert [path.name for path in Path("cache").rglob("*") if path.is_file()] == [".lock"]


def test_location_when_it_is_a_url_then_only_that_of_a_file_is_a_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert run_location("~/runs/x") == Path("/home/ada/runs/x")
    assert run_location("file:///data/x") == Path("/data/x")
    assert run_location("s3://bucket/x/") == RunUrl("s3://bucket/x")
