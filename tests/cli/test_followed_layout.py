"""A run of `weft plan deploy --execute` moves to another layout when jobs end, to the bytes of one device."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from weft.parallel.replicas import following_engine
from weft.parallel.replicas.following_engine import FollowingEngine
from weft.plan.replan import LayoutForecast, MoveCost

JOBS = ("long", "short", "other")
MOVES_FOR_NOTHING = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from test_followed_layout import forecast_at_once, move_for_nothing
from weft.store import faults
from weft.cli.main import main
forecast_at_once(setattr)
move_for_nothing(setattr)
faults.arm(faults.parse("kill@2:replicas.move"))
sys.argv = ["weft", *sys.argv[1:]]
main()
"""
Set = Callable[[object, str, object], None]


class AtOnce:
    """Forecasts while training waits: how soon a thread has one on a busy machine is nothing to test."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, forecast: Callable[[], LayoutForecast]) -> Future[LayoutForecast]:
        found: Future[LayoutForecast] = Future()
        found.set_result(forecast())
        return found

    def shutdown(self, **_: bool) -> None: ...


def forecast_at_once(set_attribute: Set) -> None:
    set_attribute(following_engine, "ThreadPoolExecutor", AtOnce)


def move_for_nothing(set_attribute: Set) -> None:
    set_attribute(FollowingEngine, "cost", property(lambda _: MoveCost(0.0, 0.0)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two CPUs of which one alone cannot hold the samples of the job that ends first, and jobs of unlike lengths."""
    monkeypatch.chdir(tmp_path)
    # As many threads in all processes as here: bits depend on it.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    short = [{"prompt": f"Add {i}.", "completion": f"{2 * i}"} for i in range(16)]
    long = [{"prompt": f"Repeat {i}: " + "word " * 80, "completion": "word " * 100} for i in range(4)]
    for name, rows in (("short", short), ("long", long)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = {"train_data": "short.jsonl", "global_batch_size": 4, "max_length": 64, "max_steps": 12, "save_steps": 2}
    jobs = [
        {"name": "long", "train_data": "long.jsonl", "global_batch_size": 1, "max_steps": 2, "max_length": 1024},
        {"name": "short", "gradient_sum": "any_order", **few},
        {"name": "other", "adapter": {"lora_dropout": 0.1}, **few},
    ]
    run = {"base_model": "tiny", "device": "cpu", "capacity": 1024, "jobs": jobs}
    (tmp_path / "jobs.json").write_text(json.dumps(run))
    (tmp_path / "cluster.yaml").write_text(
        "base_model: tiny\nmachines: [{gpu: cpu, gpus: 2, memory_gib: 0.07}]\njobs_file: jobs.json\n"
    )
    return tmp_path


@pytest.mark.slow
def test_deploy_when_a_job_ends_then_the_run_moves_and_a_kill_in_the_middle_of_that_loses_no_bit(
    weft, folder, monkeypatch
):
    """It is killed while its jobs move; resumed without the job that has ended, it moves again, and to the end."""
    command = ("plan", "deploy", "cluster.yaml", "--execute", "--out")
    run = [sys.executable, "-c", MOVES_FOR_NOTHING, str(Path(__file__).parent), *command, "moved"]
    killed = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert killed.returncode == -signal.SIGKILL and "layout  stages:2" in killed.stdout, killed.stdout + killed.stderr
    assert not (folder / "moved/short/adapter").exists()
    forecast_at_once(monkeypatch.setattr)
    move_for_nothing(monkeypatch.setattr)
    again = weft(*command, "moved", "--resume")
    assert again.code == 0 and "layout: spread:2 instead of stages:2: it saves about" in again.out, again
    spans = json.loads((folder / "moved/timeline.json").read_text())["traceEvents"]
    assert [span["args"]["layout"] for span in spans if span["name"] == "move"] == ["spread:2"]
    assert weft("train", "jobs.json", "--out", "one").code == 0
    for job in JOBS:
        files = [folder / run / job / "adapter" / "adapter_model.safetensors" for run in ("moved", "one")]
        assert files[0].read_bytes() == files[1].read_bytes(), job
