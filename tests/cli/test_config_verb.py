"""`weft config`."""

import dataclasses
import json
from pathlib import Path

import yaml

from weft.spec import load_run, run_from_mapping
from weft.spec.reference import json_schema, sections, sweep_schema

JOBS = """\
base_model: tiny
defaults: {lr: 1e-3, lora: {rank: 4}}
jobs:
  - {name: a, data: a.jsonl}
  - {name: b, data: b.jsonl, adapter: {alpha: 5}, micro_batch_size: 2, gradient_accumulation_steps: 3}
"""


def test_config_when_alone_then_lists_every_setting_with_its_other_names(weft):
    out = weft("config").out
    for section in sections():
        for setting in section.settings:
            assert f"  {setting.name}\n" in out
            assert all(alias in out for alias in setting.aliases)
    rate = "number, above 0; optional. Peak learning rate. Default: by the adapter's method;"
    assert rate in " ".join(out.split()), "however wide the terminal is"
    assert all(line == line.rstrip() for line in out.splitlines())


def test_config_when_json_is_requested_then_lists_the_same_as_data(weft):
    listed = json.loads(weft("config", "--json").out)
    assert list(listed) == ["run", "job", "data source", "adapter", "eva"]
    rank = next(setting for setting in listed["adapter"] if setting["name"] == "r")
    assert rank["default"] == "16"
    assert rank["values"] == "integer, at least 1"
    assert rank["aliases"] == ["lora_r", "lora_rank", "rank"]


def test_config_when_the_schema_is_requested_then_prints_it(weft):
    assert json.loads(weft("config", "--schema").out) == json_schema()


def test_config_when_sweeps_are_requested_then_lists_their_settings_too(weft, tmp_path: Path):
    assert json.loads(weft("config", "--sweep", "--schema").out) == sweep_schema()
    assert "EARLY STOPPING  in early_stop of a sweep file" in weft("config", "--sweep").out
    path = tmp_path / "sweep.yaml"
    path.write_text("base_model: tiny\njob: {data: a.jsonl, eval_data: 4}\nspace: {lr: [1e-3]}\n")
    printed = yaml.safe_load(weft("config", path, "--sweep", "trials=3").out)
    assert (printed["trials"], printed["early_stop"]["factor"], printed["objective"]["mode"]) == (3, 2, "min")


def test_config_when_given_a_file_then_prints_a_jobs_file_with_every_value(weft, tmp_path: Path):
    path = tmp_path / "jobs.yaml"
    path.write_text(JOBS)
    printed = yaml.safe_load(weft("config", path).out)
    first, second = printed["jobs"]
    assert (first["learning_rate"], first["adapter"]["r"], first["adapter"]["lora_alpha"]) == (1e-3, 4, 8)
    assert (first["global_batch_size"], second["global_batch_size"]) == (8, 6)
    assert second["adapter"]["lora_alpha"] == 5
    again, original = run_from_mapping(printed), load_run(path)
    assert [dataclasses.replace(job, global_batch_size=None) for job in again.jobs][1] == original.jobs[1]
    assert json.loads(weft("config", path, "--json").out) == printed


def test_config_when_given_overrides_then_they_win(weft, tmp_path: Path):
    path = tmp_path / "jobs.yaml"
    path.write_text(JOBS)
    printed = json.loads(weft("config", path, "jobs.b.adapter.r=32", "--json").out)
    assert [job["adapter"]["r"] for job in printed["jobs"]] == [4, 32]


def test_config_when_the_file_is_wrong_then_names_the_line(refused, tmp_path: Path):
    path = tmp_path / "jobs.yaml"
    path.write_text(JOBS.replace("gradient_accumulation_steps", "gradient_acumulation_steps"))
    assert refused("config", path) == (
        f"{path} line 5: jobs.1.gradient_acumulation_steps: unknown setting. Did you mean gradient_accumulation_steps?"
    )
    assert "`weft init` writes a jobs file" in refused("config", tmp_path / "gone.yaml")
    assert refused("config", path, "--schema") == "--schema: describes all jobs files; leave out the file."


def test_config_when_a_job_is_of_another_method_then_only_its_own_settings_are_printed(weft, tmp_path: Path):
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "base_model: tiny\njobs: [{name: a, data: a.jsonl, adapter: {method: ia3}}, {name: b, data: b.jsonl}]\n"
    )
    scaled, tuned = (job["adapter"] for job in yaml.safe_load(weft("config", path).out)["jobs"])
    assert "init_ia3_weights" in scaled and "r" not in scaled
    assert "init_ia3_weights" not in tuned and tuned["r"] == 16


def test_config_when_a_setting_is_misspelt_and_misplaced_then_both_are_reported(weft, tmp_path: Path):
    path = tmp_path / "jobs.yaml"
    path.write_text(JOBS)
    done = weft("config", path, "learning_rat=1")
    assert "learning_rat=1: unknown setting. Did you mean learning_rate, a setting of a job; write it in" in done.err
    done = weft("config", path, "max_step=1")
    assert "max_step=1: unknown setting. Did you mean max_steps, a setting of a job; write it in" in done.err
