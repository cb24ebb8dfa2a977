"""A sweep trains what the space describes, keeps the best, and each trial is what it would be alone."""

from __future__ import annotations

import csv
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_model import small_model

import weft
from weft.engine.engine import Engine
from weft.engine.execute.protocol import ReplicaMemoryError
from weft.engine.timeline import TimelineRecorder
from weft.engine.train import execute_run, prepare_run
from weft.errors import ConfigError, JobError, StorageError
from weft.parallel.stages.stage_pool import StageLostError
from weft.spec import load_run
from weft.spec.load_sweep import sweep_from_mapping
from weft.store.run_dir import RunDirectory
from weft.sweeps.api import open_run, prepare_sweep
from weft.sweeps.objective import TrialObjective
from weft.sweeps.trial_loop import TrialTime
from weft.sweeps.trials_file import Trial, TrialState


def states(result) -> list[str]:
    return [str(trial.state) for trial in result.trials]


def lines(path: str = "out/trials.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_sweep_when_it_ends_then_the_best_is_kept_and_everything_is_written(settings):
    result = weft.sweep(settings(compare_speed=True))
    values = {trial.name: trial.value for trial in result.trials}
    assert states(result) == ["done"] * 4
    assert [trial.params for trial in result.trials] == [
        {"lr": 1e-3, "r": 2}, {"lr": 1e-3, "r": 4}, {"lr": 8e-3, "r": 2}, {"lr": 8e-3, "r": 4},
    ]  # fmt: skip
    assert result.best is not None and result.best.value == min(values.values())
    board = json.loads(Path("out/leaderboard.json").read_text())
    assert [row["name"] for row in board["trials"]] == sorted(values, key=lambda name: values[name])
    assert (board["metric"], board["mode"], board["sampler"]) == ("eval_loss", "min", "grid")
    assert board["tokens"] == sum(trial.tokens for trial in result.trials) > 0
    assert board["one_by_one_seconds"] > 0 and board["seconds"] > 0
    assert result.leaderboard[0]["points"][-1]["value"] == result.best.value
    assert all(len(row["losses"]) == 9 and row["seconds"] > 0 for row in board["trials"])
    with open("out/leaderboard.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [row["name"] for row in board["trials"]]
    assert float(rows[0]["lr"]) == result.best.params["lr"]
    best = load_file("out/best/adapter_model.safetensors")
    own = load_file(f"out/trials/{result.best.name}/adapter/adapter_model.safetensors")
    assert all((best[name] == own[name]).all() for name in own)
    assert "t000" in Path("out/report.html").read_text()


def test_trial_when_its_job_is_trained_alone_then_is_the_same_to_the_bit(settings):
    result = weft.sweep(settings(early_stop="asha"))
    assert result.best is not None
    spec = load_run("out/best/jobs.yaml")
    run = prepare_run(spec, base_dir=Path("out/best"))
    with RunDirectory.open("alone", resume=False) as directory:
        execute_run(run, directory, on_event=lambda event: None)
    written = Path("alone/best/adapter/adapter_model.safetensors").read_bytes()
    assert written == Path("out/best/adapter_model.safetensors").read_bytes()
    assert run.engine.jobs["best"].best_eval == min(point.value for point in result.best.points)


def test_sweep_when_slots_are_few_then_a_trial_that_ends_makes_room_for_the_next(settings, monkeypatch):
    most, engines = 0, []
    submit = Engine.submit

    def counted(self, *args, **keywords):
        nonlocal most
        engines.append(self)
        submit(self, *args, **keywords)
        most = max(most, sum(not job.state.is_final for job in self.jobs.values()))

    monkeypatch.setattr(Engine, "submit", counted)
    few = weft.sweep(settings(max_jobs=2, output_dir="few"))
    assert most == 2 and states(few) == ["done"] * 4
    assert not engines[0].jobs, "a job that has ended holds its adapter and its optimizer"
    many = weft.sweep(settings(output_dir="many"))
    assert most == 4
    assert [trial.value for trial in few.trials] == [trial.value for trial in many.trials]


def test_trials_when_they_share_data_then_it_is_tokenised_once(settings, monkeypatch):
    from weft.sweeps import configure

    read = []
    load = configure.load_job_data

    def count(job: Any, *rest: Any, **named: Any) -> Any:
        read.append(job.max_length)
        return load(job, *rest, **named)

    monkeypatch.setattr(configure, "load_job_data", count)
    weft.sweep(settings(space={"lr": [1e-3, 8e-3], "max_length": [32, 48]}))
    assert sorted(read) == [32, 48]
    weft.sweep(settings(space={"seed": [1, 2]}, job={"eval_data": ["rows.jsonl"]}, output_dir="seeds"))
    assert len(read) == 3


def test_asha_when_some_fall_behind_then_they_stop_with_a_reason_and_the_best_is_the_same(settings):
    space = {"lr": [1e-5, 1e-4, 2e-3, 8e-3, 1.6e-2, 3e-2]}
    full = weft.sweep(settings(space=space, output_dir="full"))
    rule = {"rule": "asha", "factor": 3, "grace": 3, "unit": "steps", "min_trials": 3}
    result = weft.sweep(settings(space=space, early_stop=rule))
    stopped = [trial for trial in result.trials if trial.state is TrialState.STOPPED]
    assert len(stopped) == 3
    assert all("was not among the best 3 of 6 trials" in trial.reason for trial in stopped)
    assert all(trial.steps < 9 and trial.points[0].step == 3 for trial in stopped)
    assert result.best is not None and full.best is not None
    assert (result.best.params, result.best.value) == (full.best.params, full.best.value)
    assert sum(trial.tokens for trial in result.trials) < 0.8 * sum(trial.tokens for trial in full.trials)
    recorded = {line["name"]: (line["reason"], line["steps"]) for line in lines() if line["kind"] == "end"}
    assert all(recorded[trial.name] == (trial.reason, trial.steps) for trial in stopped)
    assert not Path(f"out/trials/{stopped[0].name}/adapter").exists()


@pytest.mark.parametrize("max_jobs", [1, 2])
def test_halving_when_slots_are_few_then_all_wait_for_each_other_and_the_best_go_on(settings, max_jobs):
    rule = {"rule": "halving", "grace": 3, "unit": "steps", "min_trials": 2}
    result = weft.sweep(settings(max_jobs=max_jobs, early_stop=rule))
    assert sorted(states(result)) == ["done", "done", "stopped", "stopped"]
    first = sorted(trial.points[0].value for trial in result.trials)
    assert all(t.points[0].value in first[2:] for t in result.trials if t.state is TrialState.STOPPED)


def test_trial_when_it_diverges_then_it_fails_with_its_reason_and_the_others_do_not_notice(settings):
    wild = weft.sweep(settings(space={"lr": [1e-3, 1e12]}, output_dir="wild"))
    tame = weft.sweep(settings(space={"lr": [1e-3]}))
    assert states(wild) == ["done", "failed"]
    assert "diverged" in wild.trials[1].reason
    assert wild.trials[0].value == tame.trials[0].value
    assert wild.leaderboard[-1]["value"] is None


def test_trial_when_memory_ends_while_it_is_scored_then_it_alone_fails_and_reports_it(settings, monkeypatch):
    value, calls = TrialObjective.value, []

    def end(self: TrialObjective, *given: Any) -> float:
        calls.append(given)
        if len(calls) == 1:
            raise ReplicaMemoryError("no room")
        return value(self, *given)

    monkeypatch.setattr(TrialObjective, "value", end)
    result = weft.sweep(settings(space={"lr": [1e-3, 2e-3]}))
    assert sorted(states(result)) == ["done", "failed"]
    assert "ran out of memory in its evaluation" in next(t.reason for t in result.trials if str(t.state) == "failed")


def test_sweep_when_a_replica_is_lost_while_a_trial_is_scored_then_ends_in_a_sentence_and_goes_on(
    settings, monkeypatch
):
    """No trial counts as failed for it."""
    given = settings(space={"lr": [1e-3]}, objective="exact_match")
    with monkeypatch.context() as patch:

        def lose(*_: Any) -> float:
            raise StageLostError("was ended by signal 9.", where="replica 1")

        patch.setattr(Engine, "answer", lose)
        with pytest.raises(JobError, match="replica 1: was ended by signal 9"):
            weft.sweep(given)
    assert states(weft.sweep(given, resume=True)) == ["done"]


def test_sweep_when_every_trial_fails_then_there_is_no_best_and_all_are_reported(settings):
    result = weft.sweep(settings(space={"lr": [1e12]}))
    assert result.best is None and not Path("out/best").exists()
    assert Path("out/report.html").exists()


def test_budget_when_it_is_used_up_then_running_trials_are_scored_and_kept(settings):
    result = weft.sweep(settings(max_tokens=300))
    assert states(result) == ["stopped"] * 4
    assert all("the budget of 300 tokens was used up" in trial.reason for trial in result.trials)
    assert all(trial.value is not None for trial in result.trials)
    assert result.best is not None and Path("out/best/adapter_model.safetensors").exists()
    assert 260 < sum(trial.tokens for trial in result.trials) <= 300, "a step that would exceed it is not begun"
    for trial in result.trials:
        status = json.loads(Path(f"out/trials/{trial.name}/status.json").read_text())
        assert (status["state"], status["step"]) == ("cancelled", trial.steps)
    quick = weft.sweep(settings(max_seconds=1e-6, output_dir="quick"))
    assert all(trial.steps == 0 for trial in quick.trials) and quick.best is None


def test_budget_when_it_is_used_up_then_no_other_trial_is_begun(settings):
    result = weft.sweep(settings(max_tokens=100, max_jobs=2))
    assert states(result) == ["stopped"] * 2


def test_trial_when_it_has_been_stopped_then_later_reports_of_the_engine_about_it_are_ignored(settings):
    for budget in (260, 300):  # the one is used up by the first of four trials, the other by a later one
        result = weft.sweep(settings(max_tokens=budget, job={"eval_steps": 1}, output_dir=f"out{budget}"))
        recorded = lines(f"out{budget}/trials.jsonl")
        assert sum(trial.tokens for trial in result.trials) <= budget
        assert max(t.steps for t in result.trials) - min(t.steps for t in result.trials) <= 1, "side by side"
        for trial in result.trials:
            kinds = [line["kind"] for line in recorded if line.get("name") == trial.name]
            assert kinds.count("end") == 1 and kinds[-1] == "end"
            assert trial.points[-1].step == trial.steps == len({point.step for point in trial.points})
            assert trial.points[-1].tokens == trial.tokens
            assert f"at step {trial.steps} the budget of {budget} tokens" in trial.reason


def test_order_when_trials_differ_in_length_then_the_longest_start_first_and_end_the_same(settings):
    space = {"max_steps": [2, 5, 9, 3], "lr": [4e-3]}
    result = weft.sweep(settings(space=space, max_jobs=2))
    assert [trial.name for trial in result.trials] == ["t002", "t001", "t003", "t000"]
    assert [trial.params["max_steps"] for trial in result.trials] == [9, 5, 3, 2]
    began = [trial.started_s for trial in result.trials]
    assert None not in began and began == sorted(began)
    assert all(trial.ended_s > trial.started_s for trial in result.trials)
    alone = weft.sweep(settings(space={**space, "max_steps": [3]}, output_dir="alone"))
    assert alone.trials[0].value == result.trials[2].value
    cut = weft.sweep(settings(space=space, max_jobs=2, max_tokens=10**6, output_dir="cut"))
    assert [trial.name for trial in cut.trials] == ["t000", "t001", "t002", "t003"]


def test_order_when_the_sweep_is_stopped_then_goes_on_with_the_same_trials(settings):
    given = settings(space={"max_steps": [2, 5, 9, 3], "lr": [4e-3]}, max_jobs=1, sampler="random", trials=3)
    whole = weft.sweep({**given, "output_dir": "whole"})
    prepared = prepare_sweep(sweep_from_mapping(given, base_dir=Path()), Path())
    with open_run(prepared, Path("out"), resume=False) as run:
        run.train(should_stop=lambda: run.trials[0].steps >= 2)
    result = weft.sweep(given, resume=True)
    expected = {trial.name: (trial.params, trial.value) for trial in whole.trials}
    assert {trial.name: (trial.params, trial.value) for trial in result.trials} == expected
    assert sorted(expected) == ["t000", "t001", "t002"]


def test_random_when_given_a_number_of_trials_then_tries_that_many(settings):
    space = {"lr": {"min": 1e-3, "max": 1e-2, "log": True}, "alpha": {"times_r": [1, 2]}}
    result = weft.sweep(settings(space=space, trials=3))
    assert len({trial.params["lr"] for trial in result.trials}) == 3
    job = json.loads(Path("out/trials/t000/job.json").read_text())
    assert job["adapter"]["lora_alpha"] == float(result.trials[0].params["alpha"][:-1]) * 2


def test_random_when_points_are_few_and_the_end_is_open_then_none_is_tried_twice(settings):
    space = {"r": [1, 2, 3, 4]}
    result = weft.sweep(settings(space=space, sampler="random", trials=4, max_tokens=10**9, max_jobs=1))
    assert sorted(trial.params["r"] for trial in result.trials) == [1, 2, 3, 4]


def test_tpe_when_used_then_learns_while_a_constant_number_trains(settings):
    space = {"lr": {"min": 1e-4, "max": 1e-2, "log": True}}
    result = weft.sweep(settings(space=space, trials=5, sampler="tpe", max_jobs=2, storage="sqlite:///study.db"))
    assert states(result) == ["done"] * 5
    import optuna

    study = optuna.load_study(study_name="out", storage="sqlite:///study.db")
    assert result.best is not None and study.best_value == result.best.value


def test_configuration_when_only_together_it_cannot_be_then_that_trial_fails_and_the_others_go_on(settings):
    together = [{"r": 2, "init": "orthogonal"}, {"r": 3, "init": True}]
    space = {"_": together, "lr": {"min": 1e-3, "max": 2e-3}}
    assert states(weft.sweep(settings(space=space, trials=2))) == ["done", "done"]
    space = {"r": {"min": 2, "max": 3, "step": 1}, "init": [True, "orthogonal"], "lr": {"min": 1e-3, "max": 2e-3}}
    with pytest.raises(ConfigError, match="orthogonal needs even ranks"):
        weft.sweep(settings(space={"r": [2, 3], "init": [True, "orthogonal"]}, output_dir="grid"))
    result = weft.sweep(settings(space=space, trials=6, seed=1, output_dir="draws"))
    failed = [trial for trial in result.trials if trial.state is TrialState.FAILED]
    assert failed and all("orthogonal needs even ranks" in trial.reason for trial in failed)
    assert len(failed) < 6


def test_patience_when_it_runs_out_then_the_value_is_that_of_the_adapter_that_is_written(settings):
    job = {"eval_steps": 1, "early_stopping_patience": 2, "max_steps": 30}
    result = weft.sweep(settings(space={"lr": [3e-2]}, job=job))
    (trial,) = result.trials
    assert trial.steps < 30 and trial.state is TrialState.DONE
    assert trial.value == min(point.value for point in trial.points)


def accuracies(name: str, folder: str = "out") -> dict[int, tuple[float, float]]:
    """Loss and token accuracy of a trial's evaluations, by step."""
    recorded = lines(f"{folder}/trials/{name}/metrics.jsonl")
    return {t["step"]: (t["eval_loss"], t["eval_mean_token_accuracy"]) for t in recorded if "eval_loss" in t}


def test_token_accuracy_when_it_is_the_objective_then_the_largest_is_best_everywhere(settings):
    rule = {"rule": "asha", "factor": 2, "grace": 6, "unit": "steps", "min_trials": 2}
    space, job = {"lr": [1e-5, 8e-3, 5e-2, 6e-2]}, {"eval_steps": 3, "max_steps": 12}
    result = weft.sweep(settings(space=space, objective="token_accuracy", early_stop=rule, job=job))
    for trial in result.trials:
        seen = {step: accuracy for step, (_, accuracy) in accuracies(trial.name).items()}
        assert {point.step: point.value for point in trial.points} == seen
    done = {t.name: t.value for t in result.trials if t.state is TrialState.DONE}
    stopped = [t for t in result.trials if t.state is TrialState.STOPPED]
    assert result.best is not None and result.best.value == max(done.values()) > 0
    assert [t.params["lr"] for t in stopped] == [1e-5, 8e-3]
    assert all("its best token_accuracy" in t.reason and "(≥ 0." in t.reason for t in stopped)
    board = json.loads(Path("out/leaderboard.json").read_text())
    assert (board["metric"], board["mode"]) == ("token_accuracy", "max")
    assert board["trials"][0]["name"] == result.best.name
    best, own = (
        load_file(f"out/{path}/adapter_model.safetensors") for path in ("best", f"trials/{result.best.name}/adapter")
    )
    assert all((best[name] == own[name]).all() for name in own)


def test_token_accuracy_when_patience_or_the_budget_ends_a_trial_then_is_that_of_its_adapter(settings):
    job = {"eval_steps": 1, "early_stopping_patience": 2, "max_steps": 30}
    (trial,) = weft.sweep(settings(space={"lr": [3e-2]}, job=job, objective="token_accuracy")).trials
    seen = accuracies(trial.name)
    assert trial.value == min(seen.values())[1] != seen[max(seen)][1], "the adapter is that of the smallest loss"
    given = {"space": {"lr": [8e-3]}, "job": {"eval_steps": 1}, "output_dir": "whole"}
    weft.sweep(settings(**given, objective="token_accuracy"))
    (cut,) = weft.sweep(
        settings(space={"lr": [8e-3]}, max_tokens=100, objective="token_accuracy", output_dir="cut")
    ).trials
    assert cut.state is TrialState.STOPPED and 0 < cut.steps < 9 and not accuracies("t000", "cut")
    assert cut.value == accuracies("t000", "whole")[cut.steps][1]


def test_second_sweep_when_started_from_the_first_then_nothing_is_trained_twice(settings):
    first = weft.sweep(settings())
    space = {"r": [2, 4], "learning_rate": [8e-3, 4e-3]}
    given = settings(space=space, start_from="out", output_dir="second")
    second = weft.sweep(given)
    taken = {trial.name: trial for trial in second.trials if trial.origin}
    assert [trial.params["learning_rate"] for trial in taken.values()] == [8e-3, 8e-3]
    same = {trial.params["r"]: trial.value for trial in first.trials if trial.params["lr"] == 8e-3}
    assert all(trial.value == same[trial.params["r"]] for trial in taken.values())
    assert sorted(path.name for path in Path("second/trials").glob("t0*")) == ["t001", "t003"]
    assert second.best is not None and Path("second/best/adapter_model.safetensors").exists()
    spent = json.loads(Path("second/leaderboard.json").read_text())["tokens"]
    assert spent == sum(trial.tokens for trial in second.trials if not trial.origin) > 0
    assert [trial.points for trial in weft.sweep(given, resume=True).trials] == [t.points for t in second.trials]
    other = settings(start_from="out", output_dir="third", objective="exact_match")
    with pytest.raises(ConfigError, match=r"start_from: out was scored by eval_loss \(min\), this sweep is by exact"):
        weft.sweep(other)
    assert not Path("third").exists()


def test_second_sweep_when_the_data_or_the_model_has_changed_since_then_trains_everything(settings):
    """The same settings are not the same trial then; `start_from` still teaches the sampler."""
    one = {"space": {"lr": [8e-3]}, "job": {"max_steps": 2}}
    weft.sweep(settings(**one))
    assert weft.sweep(settings(**one, start_from="out", output_dir="same")).trials[0].origin
    rows = Path("rows.jsonl")
    kept = rows.read_text()
    rows.write_text("".join(reversed(kept.splitlines(keepends=True))))
    assert not weft.sweep(settings(**one, start_from="out", output_dir="other-data")).trials[0].origin
    rows.write_text(kept)
    model = Path(shutil.copytree(small_model(), "model"))
    weft.sweep({**settings(**one, output_dir="mine"), "base_model": "./model"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    given = {**settings(**one, start_from="mine", output_dir="other-model"), "base_model": "./model"}
    assert not weft.sweep(given).trials[0].origin


def test_sweep_when_the_folder_holds_one_then_only_resume_touches_it(settings):
    weft.sweep(settings(space={"lr": [1e-3]}))
    with pytest.raises(StorageError, match=r"out: already holds a sweep\. Use --resume"):
        weft.sweep(settings())
    with pytest.raises(ConfigError, match=r"space: the sweep in out has .* a resumed sweep keeps it"):
        weft.sweep(settings(), resume=True)
    with pytest.raises(StorageError, match="new: there is no sweep to resume"):
        weft.sweep(settings(output_dir="new"), resume=True)


def test_file_when_given_by_its_path_then_keywords_change_it_and_data_lies_beside_it(settings, tmp_path, monkeypatch):
    import yaml

    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(settings()))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = weft.sweep("../sweep.yaml", space={"lr": [1e-3]}, out_dir="mine")
    assert result.folder == Path("mine") and states(result) == ["done"]
    assert (elsewhere / "mine/best/jobs.yaml").exists()


def test_shares_when_a_microbatch_is_recorded_after_what_began_later_then_counts_once():
    """A microbatch that was started ahead is recorded when it is counted: after a checkpoint that began later."""
    timeline, trials = TimelineRecorder(), {name: Trial(i, name, {}) for i, name in enumerate("ab")}
    shares = TrialTime(timeline)
    now_s = time.perf_counter()
    timeline.add("forward_backward", 2.0, now_s, jobs={"a": 30, "b": 10})
    shares.catch_up(trials)
    timeline.add("checkpoint", 1.0, now_s + 4.0, jobs={"a": 0})
    shares.catch_up(trials)
    timeline.add("forward_backward", 4.0, now_s + 4.5, jobs={"a": 10, "b": 10})
    timeline.add("plan", 0.1, now_s + 4.6)
    for _ in range(2):
        shares.catch_up(trials)
    assert (shares.training_s, shares.training_tokens) == (pytest.approx(6.0), 60)
    assert trials["a"].seconds == pytest.approx(1.5 + 1.0 + 2.0)
    assert trials["b"].seconds == pytest.approx(0.5 + 2.0)
