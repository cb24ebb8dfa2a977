"""A run in stages goes on by itself when one of them is killed, to the bytes of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from benchmarks.pipeline.killed_layouts import STAGE
from benchmarks.processes import child_processes
from weft.cli import sweep
from weft.cli import train as verb
from weft.cli.layout_options import LayoutOptions
from weft.cli.options import ReplicaOptions
from weft.cli.watch import RESTARTS
from weft.parallel.stages.stage_pool import StageLostError
from weft.parallel.stages.stage_process import StageMemoryError
from weft.store.run_dir import RunDirectory

LOST = StageLostError("was ended by signal 9, so all stages were ended.", where="stage 1", hint="Go on.")
SPEC: Any = SimpleNamespace(backbone=None, jobs=())
ORDER = verb.Order(SPEC, Path(), (), False, ReplicaOptions(), LayoutOptions("stages:2"), verb.Invocation(()), None)
ADAPTER = "adapter/adapter_model.safetensors"
TRAIN = [sys.executable, "-m", "weft", "train", "jobs.json", "--out"]
STANDS = """
import os, signal, sys
from weft.cli.main import main
from weft.engine import train

left = {int(step) for step in sys.argv.pop(1).split(",")}
execute_run = train.execute_run

def standing(run, directory, *, on_event, **options):
    def on_step(event):
        on_event(event)
        if type(event).__name__ == "StepDone" and event.job == "a" and event.step in left:
            left.remove(event.step)
            os.kill(os.getpid(), signal.SIGSTOP)
    return execute_run(run, directory, on_event=on_step, **options)

if __name__ == "__main__":
    train.execute_run = standing
    main()
"""
"""`weft`, whose first process stops itself after these steps of a: so no machine is too fast for the test."""


def test_run_when_stages_run_out_of_memory_then_starts_again_with_less_each_time(monkeypatch, capsys):
    """Not counted as a loss: it ends once there is nothing less to take."""
    tries: list[tuple[bool, int]] = []

    def one_try(order: Any, *_: Any, resume: bool, **__: Any) -> int:
        tries.append((resume, order.layout.num_lessened))
        if len(tries) <= RESTARTS + 2:
            raise StageMemoryError("its GPU ran out of memory.", where="stage 1")
        return 0

    monkeypatch.setattr(verb, "_train", one_try)
    monkeypatch.setattr(RunDirectory, "holds_run", lambda _: True)
    with pytest.raises(typer.Exit):
        verb.train_order(ORDER, Path("run"), resume=False)
    assert tries == [(number > 0, number) for number in range(RESTARTS + 3)]
    assert "stage 1 ran out of memory. All stages start again, with less in flight." in capsys.readouterr().out


def train_through(monkeypatch: pytest.MonkeyPatch, capsys: Any, num_lost: int) -> tuple[list[bool], str]:
    """Whether each try resumed, and what was printed, where so many tries lose a stage."""
    tries: list[bool] = []

    def one_try(*_: Any, resume: bool, **__: Any) -> int:
        tries.append(resume)
        if len(tries) <= num_lost:
            raise LOST
        return 0

    monkeypatch.setattr(verb, "_train", one_try)
    monkeypatch.setattr(RunDirectory, "holds_run", lambda _: len(tries) > 1)
    with pytest.raises(typer.Exit):
        verb.train_order(ORDER, Path("run"), resume=False)
    return tries, capsys.readouterr().out


def test_run_when_stages_are_lost_then_it_resumes_as_soon_as_there_is_a_run(monkeypatch, capsys):
    tries, printed = train_through(monkeypatch, capsys, num_lost=2)
    assert tries == [False, False, True]
    assert "stage 1: was ended by signal 9, so all stages were ended. They start again, at most 3 times." in printed
    assert "at most 2 times" in printed


def test_run_when_stages_are_lost_too_often_then_the_last_loss_is_reported(monkeypatch, capsys):
    with pytest.raises(StageLostError, match="stage 1: was ended by signal 9"):
        train_through(monkeypatch, capsys, num_lost=RESTARTS + 1)


def test_sweep_when_stages_are_lost_then_its_trials_go_on_as_soon_as_there_are_any(weft, tmp_path, monkeypatch):
    tries: list[bool] = []

    def one_try(_: Path, order: sweep.Order, *__: Any) -> int:
        tries.append(order.resume)
        if len(tries) < 3:
            raise LOST
        return 0

    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    job = "{train_data: rows.jsonl, eval_data: 1}"
    (tmp_path / "sweep.yaml").write_text(f"{{base_model: tiny, job: {job}, space: {{r: [2, 4]}}}}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "_sweep_in", one_try)
    monkeypatch.setattr(RunDirectory, "holds_run", lambda _: len(tries) > 1)
    result = weft("sweep", "sweep.yaml", "--layout", "stages:2", "--out", "out")
    assert result.code == 0, result.err
    assert tries == [False, False, True]
    assert "They start again, at most 3 times." in result.out and "at most 2 times." in result.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jobs file with its data, and what one device has made of it."""
    path = tmp_path_factory.mktemp("lost")
    rows = [{"prompt": f"Add {i}.", "completion": f"{2 * i}"} for i in range(32)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = {"train_data": "rows.jsonl", "global_batch_size": 4, "max_steps": 8, "save_steps": 1}
    jobs = {
        "base_model": "tiny",
        "device": "cpu",
        "defaults": defaults,
        "jobs": [{"name": "a"}, {"name": "b", "gradient_sum": "any_order"}],
    }
    (path / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run([*TRAIN, "one"], cwd=path, check=True, capture_output=True, timeout=300)
    return path


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        ("stages:2", {1: 0, 3: 1, 6: 0}),
        ("shards:2", {3: 1}),
        ("stages:1+stages:2", {3: 2}),
        ("stages:1+shards:2", {2: 2, 5: 0}),
        ("shards:2,stages:2", {3: 1}),
    ],
)
def test_run_when_stages_are_killed_then_its_adapters_are_those_of_one_device(folder, layout, kills):
    """`kill -9` of a stage once a job has reported a step: nothing hangs, nothing is lost, no bit differs."""
    steps = ",".join(map(str, kills))
    staged = [sys.executable, "-c", STANDS, steps, *TRAIN[3:], layout, "--layout", layout]
    with subprocess.Popen(staged, cwd=folder, stdout=subprocess.DEVNULL) as run:
        try:
            for stage in kills.values():
                until(lambda: state(run.pid) == "T" or run.poll() is not None)
                os.kill(child_processes(run.pid, STAGE)[stage], signal.SIGKILL)
                os.kill(run.pid, signal.SIGCONT)
                until(lambda: state(run.pid) != "T")
            assert run.wait() == 0
        finally:
            run.kill()
    for job in ("a", "b"):
        assert (folder / "one" / job / ADAPTER).read_bytes() == (folder / layout / job / ADAPTER).read_bytes()
