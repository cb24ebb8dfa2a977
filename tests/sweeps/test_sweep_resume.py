"""A sweep that was stopped or killed goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_model import small_model

import weft
from weft.engine.engine import Engine
from weft.errors import ConfigError, StorageError, WeftError
from weft.plan.cost.shape import capacities
from weft.spec.load_sweep import sweep_from_mapping
from weft.store import faults
from weft.store.owner import Owner
from weft.store.run_dir import RunDirectory
from weft.store.wall_clock import Activity, TimeSplit
from weft.sweeps import api
from weft.sweeps.api import open_run, prepare_sweep
from weft.sweeps.trial_loop import SweepRun
from weft.sweeps.trials_file import Observation, Trial, TrialsFile, TrialState

SCRIPT = Path(__file__).parent / "killed_sweep.py"


def lines(folder: str | Path, kind: str) -> list[dict]:
    recorded = [json.loads(line) for line in Path(folder, "trials.jsonl").read_text().splitlines()]
    return [line for line in recorded if line["kind"] == kind]


@pytest.mark.faults
@pytest.mark.slow
def test_sweep_when_killed_again_and_again_then_ends_as_if_it_never_was(settings, tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(small_model()), "2"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False, env=one_thread)
    assert finished.returncode == 0, finished.stderr
    ends = json.loads(finished.stdout)
    assert ends[-1] == "done", finished.stderr
    assert ends.count("killed") == len(ends) - 1 >= 3
    killed, undisturbed = (json.loads((tmp_path / name / "leaderboard.json").read_text()) for name in ends_of())
    for mine, theirs in zip(killed["trials"], undisturbed["trials"], strict=True):
        for name in ("rank", "name", "state", "value", "params", "steps", "tokens", "losses"):
            assert mine[name] == theirs[name], name
        seen = [[(p["step"], p["tokens"], p["value"]) for p in trial["points"]] for trial in (mine, theirs)]
        assert seen[0] == seen[1]
        adapter = Path("trials", mine["name"], "adapter", "adapter_model.safetensors")
        assert (tmp_path / "killed" / adapter).read_bytes() == (tmp_path / "undisturbed" / adapter).read_bytes()
    assert sorted(line["name"] for line in lines(tmp_path / "killed", "end")) == ["t000", "t001", "t002", "t003"]
    best = Path("best", "adapter_model.safetensors")
    assert (tmp_path / "killed" / best).read_bytes() == (tmp_path / "undisturbed" / best).read_bytes()
    assert not list((tmp_path / "killed").rglob(".tmp-weft-*"))


def ends_of() -> tuple[str, str]:
    return "killed", "undisturbed"


def test_sweep_when_stopped_then_every_trial_is_saved_and_goes_on_from_there(settings):
    given = settings(max_jobs=2, job={"save_steps": 100})
    whole = weft.sweep({**given, "output_dir": "whole"})
    prepared = prepare_sweep(sweep_from_mapping(given, base_dir=Path()), Path())
    with open_run(prepared, Path("out"), resume=False) as run:
        run.train(should_stop=lambda: any(trial.steps >= 4 for trial in run.trials))
        assert sorted(str(trial.state) for trial in run.trials) == ["training", "training"]
        written = {row["name"]: row["steps"] for row in json.loads(Path("out/leaderboard.json").read_text())["trials"]}
        assert written == {trial.name: trial.steps for trial in run.trials}
    result = weft.sweep(given, resume=True)
    assert [t.value for t in result.trials] == [t.value for t in whole.trials]
    assert [t.losses for t in result.trials] == [t.losses for t in whole.trials]
    assert [json.loads(Path(f"out/trials/t00{i}/status.json").read_text())["step"] for i in range(4)] == [9] * 4


def test_sweep_when_another_machine_takes_it_over_then_none_of_its_files_changes_any_more(settings):
    kept: dict[Path, bytes] = {}

    def take_over(kind, trial, text):
        if kind == "point" and not kept:
            Path("out/trials/.owner-1").unlink()
            other = Owner(term=2, host="far", pid=7, boot="other", token="far")
            Path("out/trials/.owner-2").write_bytes(other.encode())
            kept.update({path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()})

    spec = sweep_from_mapping(settings(max_jobs=2), base_dir=Path())
    with (
        open_run(prepare_sweep(spec, Path()), Path("out"), resume=False, on_news=take_over) as run,
        pytest.raises(StorageError, match="was taken over by process 7 on far; this process writes nothing more there"),
    ):
        run.train()
    assert kept == {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def test_sweep_when_its_directory_is_a_url_then_the_error_names_the_command(settings):
    with pytest.raises(
        ConfigError, match=r"output_dir: is the URL 's3://bucket/x'; only the command `weft sweep` takes"
    ):
        weft.sweep(settings(output_dir="s3://bucket/x"))


def test_trial_when_it_goes_on_from_an_earlier_step_then_what_was_seen_later_is_known_and_seen_again(settings):
    class GoneError(Exception):
        """The process is no more."""

    def leave(kind, trial, text):
        if kind == "point" and trial.steps == 6:
            raise GoneError

    spec = sweep_from_mapping(settings(job={"eval_steps": 3}), base_dir=Path())
    with (
        pytest.raises(GoneError),
        open_run(prepare_sweep(spec, Path()), Path("out"), resume=False, on_news=leave) as run,
    ):
        run.train()
    assert max(line["step"] for line in lines("out", "point")) == 6
    begun = []

    def note(kind, trial, text):
        if kind == "started":
            begun.append((trial.name, trial.steps, trial.points[0].step, list(trial.losses)))

    with open_run(prepare_sweep(spec, Path()), Path("out"), resume=True, on_news=note) as run:
        run.train()
        assert begun == [(f"t00{i}", 0, 3, []) for i in range(4)]
        assert [[point.step for point in trial.points] for trial in run.trials] == [[3, 6, 9]] * 4


def test_value_when_seen_again_at_the_same_step_then_the_later_one_counts(settings):
    spec = sweep_from_mapping(settings(), base_dir=Path())
    with open_run(prepare_sweep(spec, Path()), Path("out"), resume=False) as run:
        trial = Trial(0, "t000", {"lr": 1e-3, "r": 2})
        run.ledger.add(trial)
        for step, value in ((3, 2.0), (6, 1.5), (6, 1.0)):
            run.ledger.see(trial, step, 10 * step, value)
        assert [(point.step, point.tokens, point.value) for point in trial.points] == [(3, 30, 2.0), (6, 60, 1.0)]


def test_storage_when_it_is_first_named_on_resume_then_gets_the_trials_that_had_ended(settings):
    import optuna

    given = settings(space={"lr": [1e-3, 2e-3]})
    first = weft.sweep(given)
    weft.sweep({**given, "storage": "sqlite:///study.db"}, resume=True)
    study = optuna.load_study(study_name="out", storage="sqlite:///study.db")
    assert [trial.value for trial in study.trials] == [trial.value for trial in first.trials]


def test_sweep_when_resumed_after_its_end_then_trains_nothing_and_takes_a_larger_budget(settings, monkeypatch):
    given = settings(space={"lr": {"min": 1e-3, "max": 1e-2}}, trials=2, compare_speed=True)
    first = weft.sweep(given)
    alone = json.loads(Path("out/leaderboard.json").read_text())["one_by_one_seconds"]
    submit, submitted = Engine.submit, []
    monkeypatch.setattr(Engine, "submit", lambda *given, **more: submitted.append(given) or submit(*given, **more))
    shutil.rmtree("out/best")
    again = weft.sweep(given, resume=True)
    assert [t.value for t in again.trials] == [t.value for t in first.trials]
    assert not submitted and Path("out/best/adapter_model.safetensors").exists()
    assert len(lines("out", "trial")) == 2
    board = json.loads(Path("out/leaderboard.json").read_text())
    assert board["seconds"] >= max(line["at_s"] for line in lines("out", "end")), "earlier sessions count"
    assert board["one_by_one_seconds"] == alone > 0, "nothing was trained that could be measured again"
    more = weft.sweep({**given, "trials": 3}, resume=True)
    assert [t.params for t in more.trials[:2]] == [t.params for t in first.trials]
    assert len(more.trials) == 3 and more.trials[2].state is TrialState.DONE


def test_sweep_when_it_measured_a_trial_alone_then_that_counts_for_those_who_go_on(settings, monkeypatch):
    def measured(run: SweepRun) -> float:
        # What was recorded before that is too little.
        run.context.directory.write_time(TimeSplit({}))
        return 1.0

    monkeypatch.setattr(api, "one_by_one_seconds", measured)
    weft.sweep(settings(space={"lr": [1e-3]}, compare_speed=True))
    with RunDirectory.open(Path("out/trials"), resume=True) as directory:
        split = directory.read_time()
    assert split is not None and split.seconds(Activity.COMPUTING) > 0


@pytest.mark.parametrize("fault", ["7:trials.append", "1:checkpoint.write"])
def test_sweep_when_the_disk_is_full_then_reports_it_and_goes_on_later(settings, fault):
    given = settings()
    faults.arm(faults.parse(f"enospc@{fault}"))
    try:
        with pytest.raises(StorageError, match="the disk is full"):
            weft.sweep(given)
    finally:
        faults.disarm()
    assert [str(t.state) for t in weft.sweep(given, resume=True).trials] == ["done"] * 4


def test_record_when_written_then_is_read_back_and_a_torn_line_is_dropped(tmp_path):
    record = TrialsFile(tmp_path)
    trial = Trial(3, "t003", {"lr": 1e-3, "target_modules": ["q_proj"]}, total_steps=9)
    record.add_trial(trial, 0.25)
    assert TrialsFile(tmp_path).read()[0].started_s == 0.25, "one that was killed is known to have started"
    trial.points = [Observation(2, 20, 0.5, 1.0)]
    record.add_point(trial, trial.points[-1])
    trial.started_s, trial.ended_s = 0.5, 7.5
    trial.state, trial.reason, trial.steps, trial.tokens = TrialState.STOPPED, "because", 2, 20
    trial.end_tick = 2
    record.add_end(trial, 7.5)
    whole = record.path.read_bytes()
    record.path.write_bytes(whole + b'{"kind": "poi')
    again = TrialsFile(tmp_path)
    assert again.read() == [trial] and (again.seconds, again.tick) == (7.5, 2)
    assert record.path.read_bytes() == whole


def test_record_when_a_point_is_seen_again_then_the_later_line_counts(tmp_path):
    record = TrialsFile(tmp_path)
    trial = Trial(0, "t000", {})
    record.add_trial(trial, 0.0)
    for at_s, step in enumerate((2, 4, 2), start=1):
        trial.points.append(Observation(step, 10 * step, 1.0 / step, float(at_s)))
        record.add_point(trial, trial.points[-1])
    (read,) = record.read()
    seen = [(point.step, point.at_s) for point in read.points]
    assert seen == [(2, 3.0), (4, 2.0)] and read.state is TrialState.TRAINING


def test_record_when_a_trial_never_trained_then_it_has_neither_a_start_nor_an_end(tmp_path):
    """Reports draw trials from start to end; one that failed at once, or was taken over, takes no time."""
    record = TrialsFile(tmp_path)
    trial = Trial(0, "t000", {"r": 4}, TrialState.FAILED, "too large", total_steps=9, end_tick=0)
    record.add_trial(trial, 5.0)
    record.add_end(trial, 7.0)
    assert TrialsFile(tmp_path).read() == [trial]


def test_record_when_taken_over_points_are_older_than_the_sweep_then_its_clock_does_not_go_back(tmp_path):
    """What an earlier sweep saw keeps its own times; the sweep's is the latest of all."""
    record = TrialsFile(tmp_path)
    trial = Trial(0, "t000", {"r": 4}, points=[Observation(2, 20, 0.5, 1.0)], total_steps=9)
    record.add_trial(trial, 5.0)
    record.add_point(trial, trial.points[-1])
    again = TrialsFile(tmp_path)
    again.read()
    assert again.seconds == 5.0


def test_record_when_a_line_means_nothing_then_it_is_named(tmp_path):
    TrialsFile(tmp_path).path.write_text('{"kind": "end", "name": "nobody"}\n')
    with pytest.raises(StorageError, match=r"trials.jsonl line 1: is not a line of a sweep's record"):
        TrialsFile(tmp_path).read()


def test_sweep_when_capacity_is_auto_then_it_is_chosen_once_and_kept_on_resume(settings, monkeypatch):
    """In everything that is written there is a number, so that the sweep and its best job go on elsewhere as here."""
    given = settings(capacity="auto", trials=2, sampler="random", space={"lr": [1e-3, 8e-3], "max_length": [48, 40]})
    weft.sweep(given)
    read = yaml.safe_load
    written = [read(Path("out", name).read_text()) for name in ("sweep.yaml", "trials/run.json", "best/jobs.yaml")]
    assert [tree["capacity"] for tree in written] == [2048] * 3
    monkeypatch.setattr("weft.engine.engine.capacities", lambda given, _, longest: capacities(given, "cuda", longest))
    prepared = prepare_sweep(sweep_from_mapping(given, base_dir=Path()), Path())
    assert prepared.spec.capacity == prepared.engine.limits.capacity == 8192
    weft.sweep({**given, "trials": 3}, resume=True)
    assert read(Path("out/sweep.yaml").read_text())["capacity"] == 2048
    with pytest.raises(ConfigError, match="capacity: the sweep in out has 2048, this one 8192"):
        weft.sweep({**given, "capacity": 8192}, resume=True)


def _other_rows(folder: Path) -> None:
    for path in folder.glob("*.jsonl"):
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def test_sweep_when_its_data_is_other_at_its_resume_then_refused_and_no_trial_has_ended(settings):
    """Ended trials count too: later ones would be compared with them on other data."""
    given = settings(space={"lr": [1e-3, 2e-3]}, max_jobs=1)
    prepared = prepare_sweep(sweep_from_mapping(given, base_dir=Path()), Path())
    with open_run(prepared, Path("out"), resume=False) as run:
        run.train(should_stop=lambda: any(trial.state is TrialState.DONE for trial in run.trials))
    kept = {path.name: path.read_bytes() for path in Path().glob("*.jsonl")}
    trials = Path("out", "trials.jsonl").read_bytes()
    _other_rows(Path())
    with pytest.raises(WeftError, match=r"^t00\d: (train|eval)_data is not what"):
        weft.sweep(given, resume=True)
    assert Path("out", "trials.jsonl").read_bytes() == trials
    for name, data in kept.items():
        Path(name).write_bytes(data)
    assert [trial.state for trial in weft.sweep(given, resume=True).trials] == [TrialState.DONE] * 2
