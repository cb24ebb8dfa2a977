"""Columns under names of their own: `data_columns`, layouts that people have, and tables of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.data.chats import Conversation
from weft.data.formats import convert_rows
from weft.data.json_rows import ColumnMap
from weft.data.row import Row
from weft.data.sources import read_rows
from weft.errors import ConfigError, DataError
from weft.spec import JobSpec

Write = Callable[..., str]
WHERE = "train.csv line 2"


def turns(row: Row) -> list[str]:
    _, (form,) = convert_rows([row], "auto")
    assert isinstance(form, Conversation)
    return [turn.content for turn in form.turns]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "q", "completion": "a"}, ["how?", "so"]),
        ({"prompt": "Write {q} {{now}}", "completion": "{a}/{n}"}, ["Write how? {now}", "so/3"]),
        ({"prompt": "q", "completion": "n"}, ["how?", "3"]),
        ({"instruction": "q", "input": "a", "output": "n"}, ["how?\n\nso", "3"]),
        ({"messages": "talk"}, ["hi", "hello"]),
    ],
)
def test_columns_when_they_are_named_then_rows_are_read_by_them(columns: dict[str, str], expected: list[str]):
    """Names, texts with columns in braces, numbers as text, and lists as they are."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    row = Row({"q": "how?", "a": "so", "n": 3, "talk": talk, "text": "not this"}, WHERE)
    assert turns(ColumnMap(columns).apply(row)) == expected


def test_column_when_there_is_none_of_that_name_then_the_error_names_those_there_are():
    """A wrong name is answered with the names in the file."""
    with pytest.raises(DataError) as caught:
        ColumnMap({"prompt": "Classify: {sentnce}"}).apply(Row({"sentence": "x", "label": "y"}, WHERE))
    assert str(caught.value) == (
        f"{WHERE}: has no column sentnce, which data_columns.prompt needs; it has sentence, label. "
        "Did you mean sentence?"
    )


def test_data_columns_when_they_make_no_sense_then_is_a_config_error():
    """Only columns that formats read can be named, and by something."""
    for columns, message in (
        ({"prompts": "q"}, r"data_columns: 'prompts' is no column that a format reads; use prompt, completion"),
        ({"prompt": 0}, r"data_columns.prompt: got 0; use a column's name"),
        ({"prompt": ""}, r"data_columns.prompt: got ''; use a column's name"),
        ({"prompt": ["q"]}, r"data_columns"),
    ):
        with pytest.raises(ConfigError, match=message):
            JobSpec(name="job", train_data=("x.jsonl",), data_columns=columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"instruction": "do", "context": "with", "response": "done", "category": "x"}, ["do\n\nwith", "done"]),
        ({"instruction": "do", "context": "", "response": "done"}, ["do", "done"]),
        ({"sentence": "fine film", "label": 1, "idx": 7}, ["fine film", "1"]),
        ({"text": "fine film", "label": "positive"}, ["fine film", "positive"]),
        ({"instruction": "do", "output": "done", "context": "left out"}, ["do", "done"]),
        ({"instruction": "x", "prompt": "do", "response": "done"}, ["do", "done"]),
    ],
)
def test_layout_when_many_have_it_then_is_detected(values: dict[str, Any], expected: list[str]):
    """Dolly's columns, and texts with labels, need no rewriting."""
    assert turns(Row(values, WHERE)) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", "prompt;completion\nhow, so?;yes\n"),
        ("rows.csv", 'prompt\tcompletion\n"how, so?"\tyes\n'),
        ("rows.csv", 'prompt,completion\n"how, so?",yes\n'),
        ("rows.tsv", "prompt\tcompletion\nhow, so?\tyes\n"),
        ("rows.ndjson", '{"prompt": "how, so?", "completion": "yes"}\n'),
    ],
)
def test_table_when_separated_otherwise_then_is_read(write: Write, tmp_path: Path, name: str, text: str):
    """Semicolons, tabs and commas are recognised by the first line; .ndjson is .jsonl."""
    (row,) = read_rows(write(name, text), tmp_path)
    assert row.values == {"prompt": "how, so?", "completion": "yes"}


def test_table_when_it_has_no_names_then_its_columns_have_numbers(write: Write, tmp_path: Path):
    """The first line is a row too; for a table with unknown columns the error explains how to name them."""
    name = write("rows.csv", "how?,so\nwhy?,thus\n")
    named = ColumnMap({"prompt": "{1}", "completion": 2})
    assert named.by_number
    rows = [named.apply(row) for row in read_rows(name, tmp_path, has_header=False)]
    assert [turns(row) for row in rows] == [["how?", "so"], ["why?", "thus"]]
    with pytest.raises(DataError, match=r"data_columns: \{prompt: how\?, completion: so\}; in a table without .* 1,"):
        convert_rows(read_rows(name, tmp_path), "auto")
    with pytest.raises(DataError, match=r"rows.jsonl: is no table \(.csv, .tsv\), whose columns have numbers"):
        read_rows(write("rows.jsonl", "{}\n"), tmp_path, has_header=False)
