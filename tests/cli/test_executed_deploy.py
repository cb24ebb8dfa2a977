"""Four jobs on the unlike replicas that `weft plan deploy` planned for them have the bytes of one device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from weft.cli.train import PlannedPace

STEPS = 20
SUMS = {"long": "in_order", "short": "in_order", "free": "any_order", "dropped": "any_order"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three CPUs, of which one alone cannot hold the samples of one job; machines here, and all else with the jobs."""
    monkeypatch.chdir(tmp_path)
    # As many threads in the replicas' processes as here: bits depend on it.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = {
        "short": [{"prompt": f"Add {i}.", "completion": f"{2 * i}"} for i in range(16)],
        "long": [{"prompt": f"Repeat {i}: " + "word " * 80, "completion": "word " * 100} for i in range(4)],
    }
    for name, own in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    few = {"train_data": "short.jsonl", "global_batch_size": 4, "max_length": 64}
    settings = {
        "long": {"train_data": "long.jsonl", "global_batch_size": 1, "max_length": 1024},
        "short": few,
        "free": {**few, "max_grad_norm": 0.05},
        "dropped": {**few, "adapter": {"lora_dropout": 0.1}},
    }
    jobs = [{"name": name, "max_steps": STEPS, "gradient_sum": SUMS[name], **own} for name, own in settings.items()]
    run = {"base_model": "tiny", "device": "cpu", "capacity": 1024, "jobs": jobs}
    (tmp_path / "jobs.json").write_text(json.dumps(run))
    (tmp_path / "cluster.yaml").write_text("machines: [{gpu: cpu, gpus: 3, memory_gib: 0.08}]\n")
    return tmp_path


@pytest.mark.slow
def test_deploy_when_unlike_replicas_are_executed_then_every_job_has_the_bytes_of_one_device(weft, folder):
    """A replica of one stage beside one of two: jobs at home on one of them, and jobs that both train."""
    ran = weft("plan", "deploy", "cluster.yaml", "--jobs", "jobs.json", "--execute", "--out", "unlike")
    assert ran.code == 0 and "layout  stages:1+stages:2" in ran.out, ran
    assert "2 of 4 with gradient_sum in_order, each at home on one replica" in ran.out
    assert re.search(r"plan      predicted [\d.]+ s a step, measured [\d.]+ s a step \([+-][\d,]+%\)", ran.out)
    assert "The plan and the run" in (folder / "unlike" / "report.html").read_text()
    assert weft("train", "jobs.json", "--out", "one").code == 0
    for job in SUMS:
        files = [folder / run / job / "adapter" / "adapter_model.safetensors" for run in ("unlike", "one")]
        assert files[0].read_bytes() == files[1].read_bytes(), job
        steps = [json.loads(line) for line in (folder / "unlike" / job / "metrics.jsonl").read_text().splitlines()]
        assert max(entry.get("step", 0) for entry in steps) == STEPS


def test_pace_when_jobs_have_taken_unlike_numbers_of_steps_then_is_measured_by_their_tokens():
    """Ten steps of 200 tokens in 3 s: 0.3 s a step where 0.25 s was predicted."""
    found = PlannedPace(0.25, 200.0).compared(3.0, 2000)
    assert found == (("predicted", "0.25 s a step"), ("measured", "0.3 s a step (+20%)"))
    assert PlannedPace(0.25, 200.0).compared(3.0, 0) == ()
