"""`weft sweep` tries what a file describes, reports what it does, and refuses impossible settings before it starts."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from weft.cli.demo import SKILLS
from weft.sweeps.live_board import LiveBoard

FILE = """\
base_model: tiny
output_dir: out
capacity: 128
compare_speed: false
job:
  train_data: rows.jsonl
  eval_data: 2
  max_length: 48
  max_steps: 2
  global_batch_size: 2
space:
  lr: [1e-3, 8e-3]
  r: [2]
"""


UNLIKE = (
    "capacity=64",
    "early_stop=none",
    "space={_: [{global_batch_size: 10, max_steps: 12}, {global_batch_size: 4, max_steps: 26}]}",
)
"""Trials of three microbatches a step, and of one."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps(row) + "\n" for row in SKILLS["shout"].rows(0, 12))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "sweep.yaml").write_text(FILE)
    return tmp_path


def test_sweep_when_it_ends_then_reports_the_best_and_where_everything_is(weft, folder):
    result = weft("sweep", "sweep.yaml")
    assert result.code == 0, result.err
    assert "space     lr, r: 2 points" in result.out and "sampler   grid" in result.out
    assert "early stopping: none, 2 trials are too few for asha (min_trials 8)" in result.out
    assert "t000: started (lr 0.001, r 2)" in result.out
    assert "best      t001: eval_loss" in result.out and "report    out/report.html" in result.out
    assert (folder / "out/best/adapter_config.json").exists()
    again = weft("train", "out/best/jobs.yaml", "--out", "again")
    assert again.code == 0, again.err
    mine, best = (
        Path(folder, "adapter_model.safetensors").read_bytes() for folder in ("again/best/adapter", "out/best")
    )
    assert mine == best
    more = weft("sweep", "sweep.yaml", "--resume")
    assert more.code == 0 and "started" not in more.out and "best      t001" in more.out
    Path("rows.jsonl").write_text("".join(reversed(Path("rows.jsonl").read_text().splitlines(keepends=True))))
    for flags in (("--dry-run",), ()):
        refused = weft("sweep", "sweep.yaml", "--resume", *flags)
        assert refused.code == 2 and "_data is not what" in refused.err, refused


def test_sweep_when_plotly_is_missing_then_ends_well_and_reports_it(weft, folder, monkeypatch):
    """The best and the leaderboard are there; only their picture is not."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    done = weft("sweep", "sweep.yaml")
    assert done.code == 0, done.err
    assert "no report: report.html needs plotly" in done.out and "best      t" in done.out
    assert any(folder.glob("**/best/adapter_model.safetensors")) and not any(folder.glob("**/report.html"))


def test_sweep_when_its_data_is_not_there_then_nothing_waits_for_the_model(weft, folder, monkeypatch):
    monkeypatch.setattr("weft.engine.execute.memory.load_backbone", lambda *_: pytest.fail("is loaded"))
    result = weft("sweep", "sweep.yaml", "job.eval_data=rows2.jsonl")
    assert (result.code, result.err) == (2, "error: rows2.jsonl: there is no such file. Did you mean rows.jsonl?\n")
    assert not (folder / "out").exists()


def test_dry_run_when_requested_then_checks_everything_and_writes_nothing(weft, folder):
    result = weft("sweep", "sweep.yaml", "--dry-run", "--trials", "1", "--no-early-stop")
    assert result.code == 0
    assert "sampler   random, at most 1 trial\n" in result.out and "early stopping: none" in result.out
    assert sorted(os.listdir(folder)) == ["rows.jsonl", "sweep.yaml"]


def test_dry_run_when_its_directory_can_never_be_made_then_reports_it(weft, folder):
    for flags in (("--dry-run",), ()):
        result = weft("sweep", "sweep.yaml", "--out", "/proc/never/out", *flags)
        assert result.code == 2 and result.err.startswith("error: /proc/never")
        assert "backbone" not in result.out, "before anything is loaded"


def test_dry_run_when_requested_then_shows_the_plan_for_this_device_or_for_others(weft, folder):
    here = weft("sweep", "sweep.yaml", "--dry-run")
    assert "2 configurations, 120 tokens, in 1 pack on 1 x cpu: about" in here.out, here.out
    assert "for any plan: this one is within" in here.out and "2: t000, t001" in here.out
    ranges = "space={lr: {min: 1e-4, max: 1e-2, log: true}, r: [2, 64]}"
    there = weft("sweep", "sweep.yaml", ranges, "--trials", "6", "--dry-run", "--device", "A100-40", "--gpus", "4")
    assert there.code == 0 and "6 configurations" in there.out and "on 4 x a100-40" in there.out
    assert "one by one with PEFT about" in there.out and "kernels" not in there.out
    assert sorted(os.listdir(folder)) == ["rows.jsonl", "sweep.yaml"]


def test_sweep_when_no_trial_has_a_value_then_exits_with_1(weft, folder):
    result = weft("sweep", "sweep.yaml", "space.lr=[1e12]")
    assert result.code == 1
    assert "failed: diverged" in " ".join(result.out.split()) and "best      none" in result.out
    assert "did not have to be trained" not in result.out and "one by one would take" not in result.out


HUGE = "space={r: {min: 1, max: 32}, max_steps: {min: 1, max: 32}}"
CASES = {
    "empty space": (["space={}"], "space={}: there is nothing to search"),
    "unknown parameter": (["space.learning_rat=[1]"], "space.learning_rat=[1]: is no setting that can be searched."),
    "rank": (["space.r=[2, 4096]"], "space.r=[2, 4096]: rank 4096 is above the smaller side of model."),
    "shared rank": (["space.r=[2]", "job.adapter.rank_pattern={q_proj: 999}"], "rank 999 is above the smaller side"),
    "metric": (["objective=exact_mach"], "objective=exact_mach: objective.metric: got 'exact_mach'; accepted are"),
    "metric without data": (["job.eval_data=null"], "job.eval_data=null: eval_loss needs eval_data"),
    "batch": (["space.batch_size=[2, 11]"], "space.batch_size=[2, 11]: a batch of 11 samples is larger than the data"),
    "shared batch": (["job.global_batch_size=64"], "job.global_batch_size=64: a batch"),
    "huge grid": ([HUGE], "}}: the grid has 1,024 points and there is no budget. --trials N tries N of them, --all"),
    "grid over a range": (["sampler=grid", "space.lr={min: 1, max: 2}"], "max: 2}: a grid needs countable values"),
    "min above max": (["space.lr={min: 2, max: 1}"], "space.lr={min: 2, max: 1}: min 2 is above max 1."),
    "log of zero": (["space.lr={min: 0, max: 1, log: true}"], "log: true}: a logarithmic range needs a min above 0"),
    "a device without a dry run": (["--device", "h100"], "--device: is for a plan; add --dry-run, because a sweep"),
    "device": (["--dry-run", "--device", "h300"], "--device: there is no device 'h300' in the table; it has h200"),
    "no module": (["space.target_modules=[[q_prj]]"], "the backbone has no linear module 'q_prj'"),
    "resume": (["--resume"], "out: there is no sweep to resume."),
    "data": (["job.train_data=gone.jsonl"], "gone.jsonl"),
    "function": (["objective={metric: gone.py:f, mode: max}"], "objective.metric: there is no file gone.py."),
    "start": (["start_from=elsewhere"], "start_from=elsewhere: elsewhere holds no sweep."),
    "trials": (["--trials", "0"], "trials=0: must be at least 1, got 0."),
    "model": (["base_model=nowhere"], "nowhere"),
    "file": (["--space", "gone.yaml"], "gone.yaml: there is no such file."),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_mistake_when_made_then_is_one_sentence_and_nothing_is_written(refused, folder, name):
    arguments, message = CASES[name]
    assert message in " ".join(refused("sweep", "sweep.yaml", *arguments).split())
    assert sorted(os.listdir(folder)) == ["rows.jsonl", "sweep.yaml"]


def test_folder_when_it_holds_a_sweep_then_is_left_alone(weft, refused, folder):
    assert weft("sweep", "sweep.yaml", "space.lr=[1e-3]").code == 0
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert refused("sweep", "sweep.yaml").startswith("out: already holds a sweep. Use --resume to go on with it")
    changed = refused("sweep", "sweep.yaml", "--resume")
    assert "space: the sweep in out has" in changed and "a resumed sweep keeps it" in changed
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.slow
def test_huge_grid_when_answered_by_a_flag_then_is_accepted(weft, folder):
    assert weft("sweep", "sweep.yaml", HUGE, "--trials", "3", "--dry-run").code == 0
    assert weft("sweep", "sweep.yaml", HUGE, "--all", "--dry-run").code == 0


def test_sweep_when_interrupted_then_saves_everything_and_explains_how_to_go_on(weft, folder, monkeypatch):
    show_news = LiveBoard.show_news

    def interrupting(board, kind, trial, text):
        show_news(board, kind, trial, text)
        if kind == "step" and trial.name == "t000" and trial.steps == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(LiveBoard, "show_news", interrupting)
        result = weft("sweep", "sweep.yaml", "--trials", "2")
    assert result.code == 130
    assert "go on with: weft sweep sweep.yaml trials=2 --out out --resume" in result.out
    assert json.loads((folder / "out/trials/t000/status.json").read_text())["step"] == 1
    again = weft("sweep", "sweep.yaml", "trials=2", "--out", "out", "--resume")
    assert again.code == 0 and "t000: started at step 1" in again.out


@pytest.mark.slow
def test_sweep_when_over_two_replicas_then_the_best_is_that_of_one_process(weft, folder):
    one, two = (weft("sweep", "sweep.yaml", *more) for more in ([], ["--replicas", "2", "--out", "two"]))
    assert (one.code, two.code) == (0, 0), two.err
    assert "replicas  2, each in a process of its own" in two.out
    mine, best = (Path(folder, "best/adapter_model.safetensors").read_bytes() for folder in ("two", "out"))
    assert mine == best


@pytest.mark.slow
def test_sweep_when_its_backbone_is_in_stages_then_answers_and_bytes_are_those_of_one_device(weft, folder):
    """What training one by one would have taken is not measured; it goes on without stages."""
    rest = ["objective=exact_match", "job.max_steps=8", "job.eval_steps=4", "compare_speed=true"]
    one = weft("sweep", "sweep.yaml", *rest)
    two = weft("sweep", "sweep.yaml", *rest, "--layout", "stages:2", "--out", "two")
    assert (one.code, two.code) == (0, 0), two.err
    assert "2 stages" in two.out and "one by one would take" not in two.out
    about = Path("two/report.html").read_text(encoding="utf-8")
    for label, value in (("backbone", "tiny"), ("kernels", "reference"), ("layout", "stages:2")):
        assert f"<dt>{label}</dt><dd>{value}</dd>" in about
    boards = [json.loads(Path(folder, "leaderboard.json").read_text())["trials"] for folder in ("out", "two")]
    values = [[(trial["name"], trial["value"]) for trial in board] for board in boards]
    assert values[0] == values[1] and len({value for _, value in values[0]}) == 2
    mine, best = (Path(folder, "best/adapter_model.safetensors").read_bytes() for folder in ("two", "out"))
    assert mine == best
    more = weft("sweep", "sweep.yaml", *rest, "--out", "two", "--resume")
    assert more.code == 0 and "started" not in more.out


@pytest.mark.slow
def test_sweep_when_its_layout_is_chosen_then_the_bytes_are_those_of_one_device(weft, folder, monkeypatch):
    """A trial of three microbatches a step trains in two stages, beside one in a single process; another layout resumes
    it."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    one, two = (weft("sweep", "sweep.yaml", *UNLIKE, *more) for more in ([], ["--layout", "auto", "--out", "two"]))
    assert (one.code, two.code) == (0, 0), two.err
    assert "layout    stages:2+stages:1: the packs" in two.out and "replicas  2, each in a process" in two.out
    assert "packs     2 packs: " in two.out and "predicted from the first steps; " in two.out
    assert json.loads(Path("two/trials/run.json").read_text())["layouts"] == ["stages:2+stages:1"]
    boards = [json.loads(Path(folder, "leaderboard.json").read_text())["trials"] for folder in ("out", "two")]
    assert [(t["name"], t["value"]) for t in boards[0]] == [(t["name"], t["value"]) for t in boards[1]]
    for trial in boards[0]:
        mine, alone = (Path(p, "trials", trial["name"], "adapter/adapter_model.safetensors") for p in ("two", "out"))
        assert mine.read_bytes() == alone.read_bytes()
    more = weft("sweep", "sweep.yaml", *UNLIKE, "--layout", "spread:2", "--out", "two", "--resume")
    assert more.code == 0 and "started" not in more.out


def test_dry_run_when_the_layout_is_auto_then_reports_what_the_first_trials_get_and_why(weft, folder, monkeypatch):
    """One that a trial of the space could not have is passed over, whether that one is among the first or not."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    chosen = weft("sweep", "sweep.yaml", "--layout", "auto", "--dry-run")
    assert chosen.code == 0 and "layout    spread:2: " in chosen.out, chosen.err
    assert "spread:2 is checked and not planned" in chosen.out
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    packs = weft("sweep", "sweep.yaml", *UNLIKE, "--layout", "auto", "--dry-run")
    assert "layout    stages:2+stages:1: the packs of these trials end after about" in packs.out, packs
    assert packs.out.count("(chosen, predicted)") == 1
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    single = weft("sweep", "sweep.yaml", "--layout", "auto", "--dry-run", "max_jobs=1", "job.global_batch_size=1")
    assert "layout    stages:1: " in single.out and "is checked" not in single.out
    lean = ["space.optim=[adamw,adamw_8bit]", "--trials", "1"]
    alone = weft("sweep", "sweep.yaml", "--layout", "auto", "--schedule", "1f1b", "--dry-run", *lean)
    assert "layout    one device, because none in stages can be" in alone.out
    assert "stages:2 not possible: " in alone.out and "adamw_8bit keeps blocks of numbers" in alone.out
    assert sorted(os.listdir(folder)) == ["rows.jsonl", "sweep.yaml"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--replicas", "0"), "error: --replicas: got '0'; accepted are auto and numbers from 1 to 1024."),
        (("--devices", "0"), "error: --devices: are for GPUs, and this run is on a CPU"),
        (("--replicas", "2", "early_stop=halving", "max_tokens=99"), "halving with a budget of tokens or time"),
        (("--layout", "stages:99"), "error: --layout: got 99 stages; the model has 6 layers, so use 1 to 6."),
        (("--layout", "auto", "--replicas", "2"), "leave --replicas out, or --layout."),
        (("--layout", "aut"), "Did you mean auto?"),
        (("--layout", "stages:2", "--replicas", "2"), "leave --replicas out, or --layout."),
        (("--layout", "stages:2", "space.optim=[adamw,adamw_8bit]"), "8bit]: adamw_8bit keeps blocks of numbers"),
        (
            ("--layout", "tensor:2", "job.adapter={init_lora_weights: eva}"),
            "eva looks at whole inputs, of which devices that share layers have parts",
        ),
        (("--layout", "stages:2", "--dry-run", "--gpus", "2"), "error: --layout: is for the devices that are here"),
    ],
)
def test_sweep_when_replicas_are_impossible_then_refused_before_anything_is_loaded(weft, folder, given, message):
    result = weft("sweep", "sweep.yaml", "device=cpu", *given)
    assert result.code == 2 and message in result.err
    assert not (folder / "out").exists()
