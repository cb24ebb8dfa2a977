"""Whole runs are timed with inputs anybody can make."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks.processes import timed
from benchmarks.wall import session as wall
from benchmarks.wall.inputs import (
    WallJobs,
    WallTime,
    caches,
    problems,
    time_train,
    write_jobs,
    write_model,
    write_problems,
)
from benchmarks.wall.prepare import PrepareTime, time_prepare
from weft.data.prepared.cache import CACHE_VARIABLE
from weft.errors import ConfigError, WeftError
from weft.plan.cost.shape import find_shape
from weft.spec import load_run


def test_problems_then_they_are_as_long_as_those_they_stand_for_and_all_differ():
    rows = list(problems(2000))
    mean = sum(len(row["prompt"]) + len(row["completion"]) for row in rows) / len(rows)
    assert mean == pytest.approx(522, rel=0.15)  # the mean of GSM8K's training rows
    assert len({row["prompt"] for row in rows}) == 2000
    assert rows == list(problems(2000))


@pytest.mark.slow
def test_time_train_when_a_run_ends_then_its_phases_lie_within_the_wall_clock(tmp_path: Path):
    shape = dataclasses.replace(find_shape("tiny"), vocabulary=300)  # a byte each, and a few marks
    write_model(tmp_path / "model", shape, torch.device("cpu"))
    write_problems(tmp_path / "rows.jsonl", 30)
    jobs = WallJobs(2, 2, settings={"save_steps": 1})
    write_jobs(tmp_path / "jobs.yaml", tmp_path / "model", jobs, tmp_path / "rows.jsonl")
    assert [job.adapter.r for job in load_run(tmp_path / "jobs.yaml").jobs] == [8, 16]
    found = time_train(tmp_path / "jobs.yaml", tmp_path / "run", {})
    assert 0 < found.before_first_s < found.before_first_s + found.training_s < found.wall_s
    assert found.spans["forward_backward"] <= found.training_s
    assert (tmp_path / "run" / "job1" / "adapter" / "adapter_model.safetensors").is_file()


def test_timed_when_the_command_fails_then_the_end_of_its_output_is_reported(tmp_path: Path):
    with pytest.raises(WeftError, match="No such command"):
        timed(["weft", "no-such-command"], {}, tmp_path / "log")


def test_choose_cases_when_a_gpu_is_missing_then_only_what_runs_here_is_chosen():
    assert wall.choose_cases([], has_gpu=False) == ["cpu", "prepare"]
    assert wall.choose_cases([], has_gpu=True) == [*wall.CASES, "prepare"]
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        wall.choose_cases(["tiny"], has_gpu=False)
    with pytest.raises(ConfigError, match="accepted are tiny, 8b, share, cpu, prepare"):
        wall.choose_cases(["small"], has_gpu=True)


def test_figures_when_training_waits_for_files_then_the_shares_report_it():
    warm = WallTime(30.0, {"forward_backward": 15.0, "step": 1.0, "checkpoint": 4.0}, training_s=20.0)
    share, stall = wall.figures("share", WallTime(60.0, {}), warm)
    assert (share.key, share.value, share.is_met) == ("wall_share", 0.8, False)
    assert (stall.key, stall.value, stall.is_met) == ("write_stall_share", 0.2, False)
    cold, again = wall.figures("tiny", WallTime(44.0, {}), warm)
    assert (cold.key, cold.is_met, again.key, again.is_met) == ("wall_tiny_cold_s", True, "wall_tiny_warm_s", False)


def test_measure_when_on_a_cpu_then_what_the_libraries_take_alone_stands_beside(tmp_path, monkeypatch):
    def train(jobs_file: Path, out: Path, variables: dict[str, str]) -> WallTime:
        out.mkdir()
        Path(variables[CACHE_VARIABLE]).mkdir(parents=True, exist_ok=True)
        return WallTime(9.0, {}, before_first_s=6.0)

    imported = []
    monkeypatch.setattr(wall, "time_train", train)
    monkeypatch.setattr(wall, "timed", lambda command, variables, log: imported.append(command) or 4.0)
    session = wall.WallSession(
        tmp_path, torch.device("cpu"), data=None, num_rows=1, peers=False, show=lambda line: None
    )
    found = {figure.key: figure.value for figure in session.measure("cpu")}
    assert found["first_step_cpu_imports_s"] == 4.0 and found["first_step_cpu_again_s"] == 6.0
    assert importlib.util.find_spec(imported[0][0]) is not None


def test_jobs_file_then_everything_but_the_search_is_left_to_the_defaults(tmp_path: Path):
    write_jobs(tmp_path / "jobs.yaml", "tiny", WallJobs(1, 3), tmp_path / "rows.jsonl")
    (job,) = json.loads((tmp_path / "jobs.yaml").read_text())["jobs"]
    assert set(job) == {"name", "data", "max_steps", "learning_rate", "adapter"}


@pytest.mark.slow
def test_prepare_when_rows_are_prepared_then_samples_are_counted_and_kept(tmp_path: Path):
    """In a fresh process, with a cache of its own that the second run finds."""
    write_problems(tmp_path / "rows.jsonl", 2000)
    found = time_prepare("weft", tmp_path / "rows.jsonl", caches(tmp_path / "caches"))
    assert found.num_samples == 2000 and found.num_tokens > 2000 * 400
    assert len(list((tmp_path / "caches" / "data").glob("*/tokens.npy"))) == 1


def test_prepare_figures_when_a_peer_was_timed_then_report_how_much_longer_it_took():
    ours = PrepareTime(10.0, 18.0, 5 * 10**8, 7, 100)
    peers = [PrepareTime(seconds, 36.0, 0, 7, 100) for seconds in (25.0, 90.0, 20.0)]
    found = {figure.key: figure for figure in wall.prepare_figures(ours, ours, [(ours, peer) for peer in peers])}
    assert {key: (figure.value, figure.is_met) for key, figure in found.items()} == {
        "prepare_vs_datasets": (2.5, True),
        "prepare_vs_datasets_cpu": (2.0, None),
        "prepare_1m_s": (10.0 * 1e6 / 7, None),
        "prepare_again_s": (10.0, False),
        "prepare_peak_gb": (0.5, True),
    }
    assert found["prepare_1m_s"].detail == "scaled from 7 rows"
    alone = [figure.key for figure in wall.prepare_figures(ours, ours, [])]
    assert alone == ["prepare_1m_s", "prepare_again_s", "prepare_peak_gb"]
    with pytest.raises(WeftError, match="datasets made 99 tokens, weft 100"):
        wall.prepare_figures(ours, ours, [(ours, PrepareTime(25.0, 1.0, 0, 7, 99))])
