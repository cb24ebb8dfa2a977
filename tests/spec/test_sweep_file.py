"""A sweep file states what is tried, how it is scored and when it ends; anything else is refused with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.spec.load_sweep import load_sweep, space_of, sweep_from_mapping, trial_job

FILE = """\
base_model: tiny
capacity: 128
job:
  train_data: rows.jsonl
  eval_data: 0.2
  max_length: 64
  lora: {rank: 4, alpha: 2r}
space:
  lr: [1e-3, 1e-4]
  rank: [4, 8]
objective: exact-match
"""


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


def mapping(**changes: Any) -> dict[str, Any]:
    job = {"train_data": "rows.jsonl", "eval_data": 2, "max_length": 64}
    return {"base_model": "tiny", "job": job, "space": {"r": [4, 8]}, **changes}


def test_sweep_when_loaded_then_trials_are_jobs_with_what_they_share_and_what_they_chose(tmp_path):
    spec = load_sweep(written(tmp_path))
    job = trial_job(spec, "t000", {"lr": 1e-3, "rank": 8})
    assert (job.name, job.train_data, job.learning_rate, job.max_length) == ("t000", ("rows.jsonl",), 1e-3, 64)
    assert (job.adapter.r, job.adapter.lora_alpha) == (8, 16.0)
    assert (spec.objective.metric, spec.objective.mode, spec.output_dir) == ("exact_match", "max", "runs/sweep")
    assert space_of(spec).num_points == 4
    assert spec.run(job).jobs == (job,) and spec.run(job).capacity == 128


def test_alpha_when_it_is_a_multiple_of_r_then_follows_the_rank():
    spec = sweep_from_mapping(mapping(space={"r": [4, 8], "alpha": {"times_r": [0.25, 2]}}), base_dir=Path())
    assert trial_job(spec, "t", {"r": 8, "alpha": "0.25r"}).adapter.lora_alpha == 2.0
    assert trial_job(spec, "t", {"r": 4, "alpha": "2r"}).adapter.lora_alpha == 8.0


def test_trial_when_the_method_is_searched_then_has_the_learning_rate_of_its_own():
    spec = sweep_from_mapping(mapping(space={"method": ["lora", "ia3"]}), base_dir=Path())
    assert [trial_job(spec, "t", {"method": method}).learning_rate for method in ("lora", "ia3")] == [2e-4, 1e-2]
    assert trial_job(spec, "t", {"r": 4, "alpha": 3}).adapter.lora_alpha == 3.0
    assert trial_job(spec, "t", {"r": 4, "alpha": "3e0"}).adapter.lora_alpha == 3.0


def test_trial_when_the_optimizer_is_searched_then_leaves_out_what_all_share_for_others():
    job = {"train_data": "rows.jsonl", "eval_data": 2, "adam_epsilon": 1e-6}
    spec = sweep_from_mapping(mapping(job=job, space={"optim": ["adamw", "lion"]}), base_dir=Path())
    assert [trial_job(spec, "t", {"optim": name}).adam_epsilon for name in ("adamw", "lion")] == [1e-6, 1e-8]


def test_overrides_when_given_then_change_the_file(tmp_path):
    changes = ["trials=3", "job.lr=0.5", "space.rank=[2]", "early_stop=none", "base.max_steps=7"]
    spec = load_sweep(written(tmp_path, FILE.replace("  lr: [1e-3, 1e-4]\n", "")), changes)
    assert (spec.trials, spec.early_stop.rule) == (3, "none")
    job = trial_job(spec, "t", {"rank": 2})
    assert (job.learning_rate, job.max_steps, job.adapter.r) == (0.5, 7, 2)


def test_axolotl_sweep_file_when_given_then_is_the_space(tmp_path):
    axolotl = tmp_path / "axolotl.yaml"
    axolotl.write_text(
        "_:\n  - {lora_r: 8, lora_alpha: 8}\n  - {lora_r: 64, lora_alpha: 16}\nlearning_rate: [3e-4, 6e-4]\n"
    )
    without = FILE[: FILE.index("space:")]
    spec = load_sweep(written(tmp_path, without), space=str(axolotl))
    assert space_of(spec).num_points == 4
    named = load_sweep(written(tmp_path, without + "space: axolotl.yaml\n"))
    assert space_of(named) == space_of(spec)
    axolotl.write_text("learning_rate: [3e-4]\nlora_rr: [1]\n")
    with pytest.raises(ConfigError, match=r"axolotl.yaml line 2: lora_rr: is no setting .* Did you mean lora_r\?"):
        load_sweep(written(tmp_path, without), space=str(axolotl))


def test_jobs_file_with_one_job_when_given_a_space_then_is_a_sweep_over_that_job(tmp_path):
    text = (
        "base_model: tiny\ndefaults: {max_length: 64, lr: 0.1}\n"
        "jobs: [{name: one, data: rows.jsonl, val_size: 2, learning_rate: 0.2}]\n"
        "space: {r: [4]}\n"
    )
    job = trial_job(load_sweep(written(tmp_path, text)), "t", {"r": 4})
    assert (job.train_data, job.max_length, job.learning_rate, job.eval_data) == (("rows.jsonl",), 64, 0.2, 2)
    with pytest.raises(ConfigError, match=r"sweep.yaml line 3: jobs.0.learning_rate: must be above 0, got 0"):
        load_sweep(written(tmp_path, text.replace("learning_rate: 0.2", "learning_rate: 0")))
    with pytest.raises(ConfigError, match="a sweep is over one job, got 2"):
        load_sweep(written(tmp_path, text.replace("[{name", "[{name: a, data: x}, {name")))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr: [1e-3", "lrr: [1e-3", "sweep.yaml line 9: space.lrr: is no setting that can be searched. Did you mean l"),
        ("[4, 8]", "[4, -1]", "sweep.yaml line 10: space.rank: must be at least 1, got -1."),
        ("rank: [4, 8]", "max_length: [64, 256]", "sweep.yaml line 10: space.max_length: max_length 256 is above"),
        ("max_length: 64", "max_lenght: 64", "sweep.yaml line 6: job.max_lenght: unknown setting."),
        ("max_length: 64", "r: 8", "sweep.yaml line 6: job.r: is a setting of the adapter. Write adapter: {r: …}"),
        ("max_length: 64", "name: mine", "sweep.yaml line 6: job.name: trials have names of their own"),
        ("  train_data: rows.jsonl\n", "", "sweep.yaml line 3: job: train_data is missing."),
        ("  eval_data: 0.2\n", "", "sweep.yaml line 3: job.eval_data: exact_match needs eval_data"),
        ("exact-match", "exact-mach", "sweep.yaml line 11: objective.metric: got 'exact-mach'; accepted are eval_loss"),
        ("objective: exact-match", "objective: {metric: accuracy}", "sweep.yaml line 11: objective.metric: accuracy"),
        ("objective: exact-match", "objective: {command: x}", "sweep.yaml line 11: objective.mode: is missing"),
        ("objective: exact-match", "early_stop: {rule: ash}", "sweep.yaml line 11: early_stop.rule: got 'ash'"),
        ("objective: exact-match", "early_stop: {unit: steps}", "sweep.yaml line 11: early_stop.grace: is missing"),
        ("objective: exact-match", "sampler: grit", "sweep.yaml line 11: sampler: got 'grit'; accepted are auto, grid"),
        ("objective: exact-match", "trails: 3", "sweep.yaml line 11: trails: unknown setting. Did you mean trials?"),
        ("lr: [1e-3, 1e-4]", "seed: [1, 2]", "sweep.yaml line 9: space.seed: the seed also chooses the samples"),
        ("space:\n  lr: [1e-3, 1e-4]\n  rank: [4, 8]\n", "", "sweep.yaml: space: there is nothing to search"),
        ("{rank: 4, alpha: 2r}", "{rank: 4, alpha: twice}", "sweep.yaml line 7: job.adapter.lora_alpha: expected"),
    ],
)  # fmt: skip
def test_sweep_file_when_something_is_wrong_then_its_line_is_named(tmp_path, old, new, message):
    assert FILE.count(old) == 1
    path = written(tmp_path, FILE.replace(old, new))
    with pytest.raises(ConfigError) as error:
        load_sweep(path)
    assert str(error.value).startswith(f"{tmp_path}/{message}")


@pytest.mark.parametrize(("written_as", "rule"), [(True, "asha"), (False, "none"), ("median", "median")])
def test_early_stop_when_it_is_one_word_then_is_a_rule_or_whether_there_is_one(written_as, rule):
    assert sweep_from_mapping(mapping(early_stop=written_as), base_dir=Path()).early_stop.rule == rule


def test_objective_when_it_is_a_function_or_a_command_then_reports_what_it_needs():
    function = sweep_from_mapping(
        mapping(objective={"metric": "python score.py:f", "mode": "maximize"}), base_dir=Path()
    )
    assert function.objective.function == ("score.py", "f")
    assert function.objective.is_max and function.objective.needs_eval_data
    job = {"train_data": "rows.jsonl", "max_length": 64}
    command = sweep_from_mapping(mapping(job=job, objective={"command": "echo 1", "mode": "min"}), base_dir=Path())
    assert command.objective.name == "command" and not command.objective.needs_eval_data
