"""A trial's value is what `weft eval` would print, what a user's function returns, or what a command prints."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.cli.demo import SKILLS
from weft.data.load import load_dataset
from weft.engine.inference.generate import Answer
from weft.errors import ConfigError, DataError
from weft.model.load import load_backbone
from weft.objectives.objective import MeanScores
from weft.spec import BackboneSpec
from weft.spec.sweep import ObjectiveSpec
from weft.sweeps.objective import TrialObjective
from weft.sweeps.trials_file import TrialState

SCORE = "def length(rows):\n    assert set(rows[0]) == {'prompt', 'answer', 'reference'}\n    return len(rows)\n"


@pytest.fixture(scope="module")
def backbone():
    return load_backbone(BackboneSpec("tiny", device="cpu"))


def eval_samples(backbone: Any, folder: Path, rows: list[dict]) -> Any:
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(["eval.jsonl"], backbone.tokenizer, max_length=64, base_dir=folder).samples


def objective(folder: Path = Path(), **settings: Any) -> TrialObjective:
    return TrialObjective(ObjectiveSpec(**settings), folder)


def test_prompts_when_made_of_samples_then_are_those_of_the_data(backbone, tmp_path):
    from weft.data.load import load_prompts

    samples = eval_samples(backbone, tmp_path, SKILLS["shout"].rows(0, 5))
    made = objective(metric="exact_match")._prompts_of(samples, backbone.tokenizer)
    read = load_prompts("eval.jsonl", backbone.tokenizer, base_dir=tmp_path)
    assert [p.tokens.tolist() for p in made] == [p.tokens.tolist() for p in read]
    assert [p.reference for p in made] == [p.reference for p in read]


def test_prompts_when_a_chat_has_several_answers_then_the_last_one_is_the_reference(backbone, tmp_path):
    words = [("user", "one"), ("assistant", "ONE"), ("user", "two"), ("assistant", "TWO")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in words]}]
    (prompt,) = objective(metric="exact_match")._prompts_of(eval_samples(backbone, tmp_path, rows), backbone.tokenizer)
    assert prompt.reference == "TWO" and "ONE" in prompt.text and "TWO" not in prompt.text


def test_answers_when_the_data_is_only_text_then_there_is_nothing_to_compare_with(backbone, tmp_path):
    samples = eval_samples(backbone, tmp_path, [{"text": "nothing to answer"}])
    with pytest.raises(DataError, match="has no prompt to answer"):
        objective(metric="exact_match").check(samples, backbone.tokenizer)
    objective(metric="eval_loss").check(samples, backbone.tokenizer)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"metric": "exact_match"}, 0.25),
        ({"metric": "accuracy", "pattern": r"answer (\w)"}, 0.5),
        ({"metric": "accuracy", "pattern": r"\d"}, 0.25),
        ({"metric": "accuracy", "choices": ["A", "B"]}, 0.75),
    ],
)
def test_score_when_answers_are_compared_then_counts_what_the_metric_means(backbone, tmp_path, settings, value):
    made = objective(metric="exact_match")._prompts_of(
        eval_samples(backbone, tmp_path, SKILLS["shout"].rows(0, 1)), backbone.tokenizer
    )

    cases = [("answer A", "answer A"), ("the answer B!", "answer B, not A"), ("A 1", "it is A 1"), ("no", "answer B")]
    given = [Answer(replace(made[0], reference=right), text) for text, right in cases]
    assert objective(**settings)._score(given) == value


def test_perplexity_when_the_loss_is_huge_then_is_infinite_and_the_trial_fails(backbone):
    objective_of_trial = objective(metric="perplexity")
    assert objective_of_trial.value(None, None, MeanScores(2.0, 0.5), Path()) == math.exp(2.0)  # type: ignore[arg-type]
    assert objective_of_trial.value(None, None, MeanScores(1e9, 0.5), Path()) == math.inf  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["token_accuracy", "token-accuracy", "mean_token_accuracy", "eval_mean_token_accuracy"]
)
def test_token_accuracy_when_it_is_the_metric_then_larger_is_better_and_no_loss_is_no_accuracy(name):
    objective_of_trial = objective(metric=name)
    assert (objective_of_trial.metric, objective_of_trial.is_max) == ("token_accuracy", True)
    assert objective_of_trial.value(None, None, MeanScores(2.0, 0.25), Path()) == 0.25  # type: ignore[arg-type]
    assert math.isnan(objective_of_trial.value(None, None, MeanScores(math.nan, 0.25), Path()))  # type: ignore[arg-type]
    objective_of_trial.check([], None)  # type: ignore[arg-type]


def test_function_when_it_is_the_metric_then_gets_the_rows_and_its_number_counts(settings, tmp_path):
    (tmp_path / "score.py").write_text(SCORE)
    result = weft.sweep(settings(objective={"metric": "score.py:length", "mode": "max"}, space={"lr": [1e-3]}))
    assert result.trials[0].value == 6.0


@pytest.mark.parametrize(
    ("line", "message"),
    [("raise ValueError('no idea')", "ValueError: no idea"), ("raise SystemExit(3)", "SystemExit: 3")],
)
def test_function_when_it_raises_or_exits_then_that_trial_fails_with_its_message(settings, tmp_path, line, message):
    (tmp_path / "score.py").write_text(f"def broken(rows):\n    {line}\n")
    result = weft.sweep(settings(objective={"metric": "score.py:broken", "mode": "max"}, space={"lr": [1e-3]}))
    assert result.trials[0].state is TrialState.FAILED
    assert result.trials[0].reason == f"score.py:broken raised {message}"


def test_command_when_it_is_the_metric_then_finds_the_adapter_and_needs_no_eval_data(settings):
    command = (
        "test -f {adapter}/adapter_model.safetensors && echo judging && wc -c < {adapter}/adapter_model.safetensors"
    )
    objective_settings = {"command": command, "mode": "min"}
    result = weft.sweep(settings(objective=objective_settings, space={"r": [4, 2]}, job={"eval_data": None}))
    assert [trial.state for trial in result.trials] == [TrialState.DONE] * 2
    assert result.best is not None and result.best.params == {"r": 2}
    sizes = [Path(f"out/trials/{t.name}/adapter/adapter_model.safetensors").stat().st_size for t in result.trials]
    assert [trial.value for trial in result.trials] == sizes


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo oh no >&2; exit 3", "the command exited with 3: oh no."),
        ("echo fine", "the last line of the command's output is no number: 'fine'."),
        ("echo nan", "its command at step 9 is nan"),
    ],
)
def test_command_when_it_gives_no_number_then_that_trial_fails(settings, command, reason):
    result = weft.sweep(settings(objective={"command": command, "mode": "min"}, space={"lr": [1e-3]}))
    assert result.trials[0].reason == reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file"),
        ("def other(rows): pass\n", "has no function length"),
        ("def length(rows:\n", "cannot be imported"),
    ],
)
def test_function_when_it_cannot_be_loaded_then_gives_the_reason(tmp_path, text, message):
    if text is not None:
        (tmp_path / "score.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        objective(tmp_path, metric="score.py:length", mode="max")
