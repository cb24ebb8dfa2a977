"""Ranks and controllers as processes that are killed and stopped: nothing hangs, and files end with the same bytes."""

from __future__ import annotations

import datetime
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from replicated_runs import files_of, run_spec, write_data
from replicated_runs import train as train_over_threads

from benchmarks.processes import child_processes
from weft.engine.events import Event, JobEnded, JobWarning, StepDone
from weft.engine.train import execute_run, prepare_run
from weft.parallel.replicas.hosts import RankPool, rank_order
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.store.run_dir import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.faults]
NAMES = [job.name for job in run_spec().jobs]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_data(path)
    return path


def test_ranks_when_one_is_killed_and_one_is_stopped_then_both_are_replaced_and_no_bit_changes(
    data, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", str(_num_threads()))
    train_over_threads(run_spec(), data, tmp_path / "alone", 0)
    steps, pending = Counter[str](), {4: signal.SIGKILL, 12: signal.SIGSTOP}
    events: list[Event] = []

    def load(spec: Any, jobs: Any, wall: Any) -> Any:
        ranks = RankGroup(RankPool(rank_order(spec, jobs), [{}, {}]), 2, silent_s=10.0)
        return ReplicatedEngine.load(spec, ranks, clock=datetime.datetime(2026, 1, 2), wall=wall)

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepDone):
            steps["all"] += 1
            rank = run.engine.jobs[event.job].rank
            due = next((number for number in pending if number <= steps["all"]), None)
            if rank in run.engine.process_ids and due is not None:
                os.kill(run.engine.process_ids[rank], pending.pop(due))

    run = prepare_run(run_spec(), base_dir=data, clock=datetime.datetime(2026, 1, 2), open_engine=load)
    try:
        with RunDirectory.open(tmp_path / "out", resume=False) as directory:
            execute_run(run, directory, on_event=on_event)
    finally:
        run.engine.close()
    assert not pending
    warnings = " ".join(event.message for event in events if isinstance(event, JobWarning))
    assert "was ended by signal 9; its jobs go on" in warnings
    assert "gave no sign of life for 10 s and was ended; its jobs go on" in warnings
    assert Counter(event.job for event in events if isinstance(event, JobEnded)) == Counter(NAMES)
    for name in NAMES:
        assert files_of(tmp_path / "out", name) == files_of(tmp_path / "alone", name)


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


JOBS = """
base_model: tiny
device: cpu
defaults: {train_data: upper.jsonl, max_steps: 30, save_steps: 3, global_batch_size: 4, max_length: 48}
jobs:
  - {name: a, seed: 1, adapter: {r: 4, lora_dropout: 0.1}}
  - {name: b, seed: 2, adapter: {r: 8}}
  - {name: c, seed: 3, adapter: {r: 2}}
"""


class Controller:
    """A `weft train` process that trains into a directory."""

    def __init__(self, folder: Path, out: str, *options: str) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "weft", "train", "jobs.yaml", "--out", out, *options]
        self.process = subprocess.Popen(
            words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []

    def read_until(self, mark: str) -> bool:
        """Reads its output up to a line with this mark; False if there is none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if mark in line:
                return True
        return False

    def finish(self) -> tuple[int, str]:
        """Its exit code and its whole output."""
        self.read_until("\0")
        with self.process:
            return self.process.wait(), "".join(self.lines)

    @property
    def rank_pids(self) -> list[int]:
        """The processes of its ranks."""
        return child_processes(self.process.pid, ["weft-rank", "weft.__main__"])


def test_controller_when_it_and_its_ranks_are_killed_then_a_resumed_run_ends_with_the_same_bytes(data, tmp_path):
    """A second controller is refused while the first one is alive."""
    (tmp_path / "jobs.yaml").write_text(JOBS.replace("upper.jsonl", str(data / "upper.jsonl")))
    assert Controller(tmp_path, "alone").finish()[0] == 0
    rng = random.Random(7)
    first = Controller(tmp_path, "out", "--replicas", "2")
    assert first.read_until("step ")
    code, output = Controller(tmp_path, "out", "--resume", "--replicas", "2").finish()
    assert code == 2 and "out: is in use by process" in output, output
    os.kill(rng.choice(first.rank_pids), signal.SIGKILL)
    assert first.read_until("its jobs go on from their last checkpoints")
    assert first.read_until("step ")
    ranks = first.rank_pids
    first.process.kill()
    first.finish()
    # It waits for ranks that have not noticed yet, and they do soon.
    code, output = Controller(tmp_path, "out", "--resume", "--replicas", "3").finish()
    assert code == 0, output
    assert ranks and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    for path in sorted((tmp_path / "alone").glob("*/adapter/adapter_model.safetensors")):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "alone")).read_bytes()


def test_replicas_when_a_stage_of_one_is_killed_then_its_jobs_go_on_and_all_bytes_are_those_of_one_device(
    data, tmp_path
):
    """Unlike replicas, each with jobs of its own; the one that lost a stage is started again as a whole."""
    (tmp_path / "jobs.yaml").write_text(JOBS.replace("upper.jsonl", str(data / "upper.jsonl")))
    assert Controller(tmp_path, "alone").finish()[0] == 0
    run = Controller(tmp_path, "out", "--layout", "stages:1+stages:2")
    assert run.read_until("replicas  2, each in a process of its own") and run.read_until("step ")
    (stages,) = [found for rank in run.rank_pids if (found := child_processes(rank, ["weft-stage"]))]
    os.kill(stages[1], signal.SIGKILL)
    code, output = run.finish()
    assert code == 0 and "replica 1 failed: stage 1: was ended by signal 9" in output, output
    for path in sorted((tmp_path / "alone").glob("*/adapter/adapter_model.safetensors")):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "alone")).read_bytes()
    assert '"stages:1+stages:2"' in (tmp_path / "out/run.json").read_text()


def test_controller_when_it_gets_a_stop_signal_then_saves_and_explains_how_to_go_on(data, tmp_path):
    (tmp_path / "jobs.yaml").write_text(JOBS.replace("upper.jsonl", str(data / "upper.jsonl")))
    run = Controller(tmp_path, "out", "--replicas", "2")
    assert run.read_until("step ")
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130 and "stopped; go on with: weft train jobs.yaml --out out --resume --replicas 2" in output, output
    assert not list((tmp_path / "out").glob(".permit-*"))
