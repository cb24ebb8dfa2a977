"""A sweep file as a newcomer writes it: errors name the right place and the right words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.spec.load_sweep import sweep_from_mapping

JOB = {"train_data": "rows.jsonl", "eval_data": 2}


def refusal(job: Any = None, space: Any = None, **settings: Any) -> str:
    """The error of a sweep with some settings changed; `job` comes on top of the one that is right."""
    given = {"base_model": "tiny", "job": {**JOB, **(job or {})}, "space": space or {"r": [4, 8]}, **settings}
    with pytest.raises(ConfigError) as error:
        sweep_from_mapping(given, base_dir=Path())
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("train_data", "is a setting of a job. Put it under job:, or search it in space."),
        ("lr", "is a setting of a job. Put it under job:, or search it in space."),
        ("lora_r", "is a setting of the adapter. Write job: {adapter: {lora_r: …}}, or search it in space."),
        ("metric", "is a setting of the objective. Write objective: {metric: …}."),
        ("grace", "is a setting of the early stop. Write early_stop: {grace: …}."),
        ("budget", "unknown setting. A budget is trials, max_tokens or max_seconds."),
        ("max_hours", "unknown setting. A budget is trials, max_tokens or max_seconds."),
        ("name", "unknown setting."),
    ],
)
def test_setting_when_it_is_outside_its_section_then_the_error_names_the_section(key, message):
    assert refusal(**{key: 3}).startswith(f"{key}: {message}")


def test_setting_of_the_sweep_when_it_is_inside_a_section_then_the_error_moves_it_beside_the_section():
    assert refusal(job={"trials": 3}) == "job.trials: is a setting of the sweep. Put it beside job:, not in it."
    assert refusal(space={"capacity": [128]}) == (
        "space.capacity: is a setting of the sweep, the same for all trials. Put it beside space:, not in it."
    )


def test_values_when_they_are_in_the_job_then_the_error_names_the_space():
    message = "job.learning_rate: expected a number, got a {}. What is to be searched goes in space."
    assert refusal(job={"lr": [1e-3, 1e-2]}) == message.format("list")
    assert refusal(job={"lr": {"min": 1e-3, "max": 1e-2}}) == message.format("mapping")
    assert "What is to be searched" not in refusal(job={"lr": "fast"})


@pytest.mark.parametrize("value", [["rows.jsonl"], "rows.jsonl"])
def test_job_when_it_holds_no_settings_then_the_error_names_some(value):
    given = {"base_model": "tiny", "job": value, "space": {"r": [4]}}
    with pytest.raises(ConfigError, match=r"^job: expected settings such as train_data: rows.jsonl, got "):
        sweep_from_mapping(given, base_dir=Path())


@pytest.mark.parametrize("value", [None, ["lr", "r"], [{"r": [4, 8]}]])
def test_space_when_it_holds_no_parameters_then_the_error_names_some(value):
    given = {"base_model": "tiny", "job": JOB, "space": value}
    with pytest.raises(
        ConfigError, match=r"^space: expected parameters such as r: \[8, 16\], or a file with them, got "
    ):
        sweep_from_mapping(given, base_dir=Path())


@pytest.mark.parametrize("text", ["2x", "x2", "2*rank", "twice"])
def test_alpha_when_it_is_no_multiple_of_r_then_the_error_shows_how_one_is_written(text):
    message = f"expected a number, or a multiple of the rank such as 2r, got '{text}'."
    assert refusal(space={"lora_alpha": [text]}) == f"space.lora_alpha: {message}"
    assert refusal(job={"adapter": {"alpha": text}}) == f"job.adapter.lora_alpha: {message}"


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"lr": "1e-4..1e-2"}, "lr: expected a number, got '1e-4..1e-2'. A range is written {min: …, max: …}"),
        ({"lr": {"low": 1}}, "lr.low: unknown word. Did you mean min?"),
        ({"lr": {"upper": 1}}, "lr.upper: unknown word. Did you mean max?"),
        ({"lr": {"values": [1]}}, "lr.values: unknown word. Did you mean choices?"),
        ({"lr": {"distribution": 1}}, "lr.distribution: unknown word. A range is even, or logarithmic with log: true."),
        ({"r": {"min": 4, "max": 8, "step": 5}}, "r.step: 5 is larger than the range from 4 to 8."),
        ({"alpha": {"times_r": ["2r"]}}, "alpha.times_r.0: expected a factor such as 2, got '2r'."),
        ({"lora": [4, 8]}, "lora: name what varies of it, such as lora: {r: [8, 16]}."),
    ],
)
def test_parameter_when_it_is_in_other_words_then_the_error_names_ours(parameter, message):
    assert refusal(space=parameter).startswith(f"space.{message}")


def test_storage_when_it_is_a_file_then_the_error_shows_how_its_address_is_written():
    assert refusal(storage="study.db") == "storage: expected an address such as sqlite:///study.db, got 'study.db'."


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (["eval_loss"], "objective: expected the name of one metric, got a list."),
        ({"metric": "eval_loss", "mode": "max"}, "objective.mode: a smaller eval_loss is better; leave the mode out"),
        (
            {"metric": "token_accuracy", "mode": "min"},
            "objective.mode: a larger token_accuracy is better; leave the mode out",
        ),
        ("accuracy", "objective.metric: accuracy needs either a pattern or choices. token_accuracy and exact_match"),
    ],
)
def test_objective_when_it_is_invalid_then_refused_with_the_reason(objective, message):
    assert refusal(objective=objective).startswith(message)
