"""Preference data in the columns people have becomes one prompt with two answers, or one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.data.load import load_dataset
from weft.errors import DataError
from weft.model.source import load_tokenizer
from weft.objectives.pairs import is_preference, read_preference

QUESTION, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "g"), ("assistant", "b"))
)
FIRST = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TOOLS = [{"type": "function"}]
FORMS: dict[str, tuple[dict[str, Any], tuple[Any, Any, Any]]] = {
    "texts": ({"prompt": "q", "chosen": "g", "rejected": "b"}, ("q", "g", "b")),
    "question": ({"question": "q", "chosen": "g", "rejected": "b"}, ("q", "g", "b")),
    "alpaca": ({"instruction": "q", "input": "i", "chosen": "g", "rejected": "b"}, ("q\n\ni", "g", "b")),
    "system": (
        {"system": "s", "question": "q", "chosen": "g", "rejected": "b"},
        ([{"role": "system", "content": "s"}, QUESTION], "g", "b"),
    ),
    "messages": ({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}, ([QUESTION], [GOOD], [BAD])),
    "whole chats": (
        {"chosen": [*FIRST, QUESTION, GOOD], "rejected": [*FIRST, QUESTION, BAD]},
        ([*FIRST, QUESTION], [GOOD], [BAD]),
    ),
    "ultrafeedback": (
        {"prompt": "q", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        ([QUESTION], [GOOD], [BAD]),
    ),
    "hh": (
        {"chosen": "\n\nHuman: q\n\nAssistant: g", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        ([QUESTION], [GOOD], [BAD]),
    ),
    "openai": (
        {"input": {"messages": [QUESTION], "tools": TOOLS}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        ([QUESTION], [GOOD], [BAD]),
    ),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "g"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        ([QUESTION], [GOOD], [BAD]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_row_when_in_a_known_form_then_both_answers_share_its_prompt(form):
    values, (prompt, chosen, rejected) = FORMS[form]
    before = repr(values)
    assert is_preference(values)
    found = read_preference(values, "p.jsonl line 1")
    assert (found.context["prompt"], found.chosen, found.rejected) == (prompt, chosen, rejected)
    assert found.context.get("tools") == (TOOLS if form == "openai" else None)
    assert repr(values) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "q", "chosen": "g"}, "has chosen and no rejected."),
        ({"prompt": "q", "rejected": "b", "chosen": ""}, "has rejected and no chosen."),
        ({"prompt": "q", "completion": "g"}, "has no preference: chosen and rejected are missing."),
        ({"prompt": "q", "chosen": "g", "rejected": "g"}, "chosen and rejected are the same answer."),
        ({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, GOOD]}, "chosen and rejected are the same answer."),
        ({"prompt": "q", "chosen": "g", "rejected": [BAD]}, "chosen is 'g' and rejected a list"),
        ({"chosen": "g", "rejected": "b"}, "has no prompt to chosen and rejected."),
        ({"chosen": [QUESTION, GOOD], "rejected": [*FIRST, BAD]}, "chosen and rejected do not answer the same prompt"),
        ({"input": {}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, "input.messages is missing."),
    ],
)
def test_row_when_it_is_no_pair_then_refused_with_the_reason(values, message):
    with pytest.raises(DataError) as error:
        read_preference(values, "p.jsonl line 1")
    assert str(error.value).startswith(f"p.jsonl line 1: {message}")


def test_pair_when_it_has_an_image_then_is_refused_by_line(tmp_path):
    rows = [
        {"prompt": "q", "chosen": "g", "rejected": "b"},
        {"prompt": "q", "chosen": "g", "rejected": "b", "image": "a.png"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="line 2: has image, but only text can be trained on"):
        load_dataset(["p.jsonl"], load_tokenizer("tiny"), max_length=64, base_dir=tmp_path)


def test_summary_when_rows_are_pairs_then_counts_pairs_and_names_the_objective_alone(tmp_path):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for objective, note in (("auto", "objective dpo, by the columns"), ("orpo", "objective orpo")):
        data = load_dataset(
            ["pairs.jsonl"], load_tokenizer("tiny"), objective=objective, max_length=200, base_dir=tmp_path
        )
        description = data.summary.describe()
        assert description.startswith("pairs.jsonl: 3 pairs (") and description.endswith(f"; {note}")
