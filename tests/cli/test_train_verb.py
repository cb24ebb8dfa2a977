"""`weft train` goes on where it can, and says what it did."""

from __future__ import annotations

import json
from pathlib import Path

from weft.demo.skills import SKILLS


def write_jobs(folder: Path, *, broken: bool) -> None:
    """Two jobs; the data of the second may be broken."""
    for name in ("shout", "reverse"):
        rows = "".join(json.dumps(row) + "\n" for row in SKILLS[name].rows(0, 12))
        (folder / f"{name}.jsonl").write_text(rows)
    if broken:
        (folder / "reverse.jsonl").write_text("{not json\n")
    (folder / "jobs.yaml").write_text(
        "base_model: tiny\n"
        "defaults: {max_steps: 2, global_batch_size: 2, max_length: 64, adapter: {r: 2}}\n"
        "jobs:\n"
        "  - {name: shout, train_data: shout.jsonl}\n"
        "  - {name: reverse, train_data: reverse.jsonl}\n"
    )


def state(job: str) -> str:
    return json.loads(Path("out", job, "status.json").read_text())["state"]


def test_resume_when_a_job_set_aside_for_its_data_is_mended_then_it_is_trained(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=True)
    first = weft("train", "jobs.yaml", "--out", "out", "--keep-going")
    assert first.code == 1 and "reverse.jsonl line 1" in first.out
    assert (state("shout"), state("reverse")) == ("succeeded", "failed")
    still = weft("train", "jobs.yaml", "--out", "out", "--resume")
    assert still.code == 2 and state("reverse") == "failed"
    write_jobs(tmp_path, broken=False)
    assert weft("train", "jobs.yaml", "--out", "out", "--resume").code == 0
    assert state("reverse") == "succeeded" and Path("out/reverse/adapter/adapter_config.json").exists()


def test_resume_when_every_job_has_ended_and_one_diverged_then_still_exits_with_1(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    wild = "jobs.reverse.learning_rate=1e10"
    assert weft("train", "jobs.yaml", wild, "--out", "out").code == 1
    again = weft("train", "jobs.yaml", wild, "--out", "out", "--resume")
    assert again.code == 1 and "nothing to resume" in again.out


def test_dry_run_when_the_run_is_endless_then_it_is_planned_all_the_same(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    plan = weft("train", "jobs.yaml", "jobs.shout.max_steps=1000000000000", "--dry-run")
    assert plan.code == 0 and "1,000,000,000,000" in plan.out
    assert not Path("runs").exists()


def test_dry_run_when_the_output_directory_holds_a_run_then_says_so(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    assert weft("train", "jobs.yaml", "--out", "out").code == 0
    refused = weft("train", "jobs.yaml", "--out", "out", "--dry-run")
    assert refused.code == 2 and "already holds a run" in refused.err


def test_train_when_memory_is_limited_on_a_cpu_then_says_that_it_limits_nothing(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    found = weft("train", "jobs.yaml", "device=cpu", "--dry-run", "--memory-limit", "40GB")
    assert found.code == 0 and "memory_limit 40GB is for GPUs; on a cpu it limits nothing." in found.out
    wrong = weft("train", "jobs.yaml", "--memory-limit", "lots")
    assert wrong.code == 2
    assert "memory_limit=lots: memory_limit: got lots; write a size such as 40GB" in " ".join(wrong.err.split())
