from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_data import assert_rows_or_data_error

from weft.data.json_rows import MAX_LINE_BYTES, parse_json
from weft.data.sources import read_rows
from weft.errors import DataError

Write = Callable[..., str]


def error_of(name: str, directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(name, directory)
    return str(caught.value)


def test_jsonl_when_bom_crlf_and_blank_lines_then_rows_keep_their_line_numbers(write: Write, tmp_path: Path):
    name = write("train.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b"}')
    rows = read_rows(name, tmp_path)
    assert [row.values for row in rows] == [{"text": "a"}, {"text": "b"}]
    assert [row.where for row in rows] == ["train.jsonl line 1", "train.jsonl line 4"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"text": }', "is not valid JSON: expecting value (column 10)."),
        (b'{"text": "a"} x', "is not valid JSON: there is more after its end (column 15)."),
        (b'{"text": "a', "is not valid JSON: it ends in the middle of a value (column 10)."),
        (b'{"text": ', "is not valid JSON: it ends in the middle of a value"),
        (b'["a"]', "is a list; each row is an object"),
        (b"17", "is 17; each row is an object"),
        (b'{"x": NaN}', "NaN is not valid JSON; write a number or null."),
        (b'{"x": -Infinity}', "-Infinity is not valid JSON; write a number or null."),
        (b'{"x": {"y": 1, "y": 2}}', "the key 'y' appears twice in one object."),
        (rb'{"x": "\ud83d"}', "has half of a surrogate pair"),
        (rb'{"\uDE00": 1}', "has half of a surrogate pair"),
        (b'{"x": ' + b"[" * 100_000, "is nested too deeply."),
        (b'{"x": ' + b"1" * 5000 + b"}", "has a number with too many digits."),
        (b'{"x": "\0"}', "has a NUL byte"),
        (b'{"x": "\xff"}', "the byte 0xff is not UTF-8; save the file as UTF-8 text."),
    ],
)
def test_jsonl_when_a_line_is_wrong_then_the_error_names_it(line: bytes, found: str, write: Write, tmp_path: Path):
    name = write("train.jsonl", b'{"text": "fine"}\n\n' + line)
    assert error_of(name, tmp_path).startswith(f"train.jsonl line 3: {found}")


def test_jsonl_when_a_surrogate_pair_is_whole_then_it_is_read(write: Write, tmp_path: Path):
    rows = read_rows(write("a.jsonl", rb'{"text": "\ud83d\ude00"}'), tmp_path)
    assert rows[0].values == {"text": "😀"}


def test_jsonl_when_a_line_is_at_the_limit_then_it_is_read_and_one_byte_more_is_refused(write: Write, tmp_path: Path):
    line = b'{"text": "' + b"a" * (MAX_LINE_BYTES - 13) + b'"}\n'
    assert len(line) == MAX_LINE_BYTES
    assert len(read_rows(write("a.jsonl", line), tmp_path)) == 1
    longer = line.replace(b"aaa", b"aaaa", 1)
    assert error_of(write("b.jsonl", longer), tmp_path) == "b.jsonl line 1: is longer than 8 MiB."


def test_jsonl_when_it_is_one_list_then_the_error_suggests_the_name_json(write: Write, tmp_path: Path):
    assert "name a file that is one list .json" in error_of(write("a.jsonl", '[\n{"text": "a"}]'), tmp_path)


def test_json_when_list_of_objects_then_rows_are_counted(write: Write, tmp_path: Path):
    rows = read_rows(write("a.json", '\n[ {"text": "a"} ,\n{"text": "b"}\n]\n'), tmp_path)
    assert [(row.where, row.values["text"]) for row in rows] == [("a.json row 1", "a"), ("a.json row 2", "b")]


def test_json_when_object_with_one_list_then_its_items_are_the_rows(write: Write, tmp_path: Path):
    rows = read_rows(write("a.json", '{"version": "1", "data": [{"text": "a"}, {"text": "b"}]}'), tmp_path)
    assert [row.where for row in rows] == ["a.json row 1", "a.json row 2"]


def test_json_when_it_is_one_chat_then_it_is_one_row(write: Write, tmp_path: Path):
    rows = read_rows(write("a.json", '{"messages": [{"role": "user", "content": "a"}]}'), tmp_path)
    assert [list(row.values) for row in rows] == [["messages"]]


def test_json_when_it_holds_lines_of_objects_then_it_is_read_as_jsonl(write: Write, tmp_path: Path):
    rows = read_rows(write("a.json", '{"text": "a"}\n{"text": "b"}\n'), tmp_path)
    assert [row.where for row in rows] == ["a.json line 1", "a.json line 2"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"a": 1},\n {"a": }]', "a.json line 2: is not valid JSON: expecting value (column 8)."),
        ('[{"a": 1}\n {"a": 2}]', "a.json line 2: is not valid JSON: expected ',' or ']' after row 1 (column 2)."),
        ('[{"a": 1},', "a.json line 1: is not valid JSON: it ends in the middle of a value (column 11)."),
        ('[{"a": 1}', "a.json line 1: is not valid JSON: it ends before the list is closed (column 10)."),
        ('[{"a": 1}] []', "a.json line 1: is not valid JSON: there is more after its end (column 12)."),
        ('[{"a": 1}, {"a": 1, "a": 2}]', "a.json row 2: the key 'a' appears twice in one object."),
        ('[{"a": 1}, {"a": NaN}]', "a.json row 2: NaN is not valid JSON; write a number or null."),
        ('[{"a": 1}, 3]', 'a.json row 2: is 3; each row is an object such as {"text": "..."}.'),
        ("[" * 100_000, "a.json row 1: is nested too deeply."),
        ('{"a": {"b": 1}}', "a.json: holds an object without a list of rows; expected a list of objects"),
        ('{"a": [{}], "b": [{}]}', "a.json: holds an object with 2 lists of rows; expected a list of objects"),
        ('{"a": ', "a.json line 1: is not valid JSON: it ends in the middle of a value"),
        ("true", "a.json: is True; each row is an object"),
        ("[]", "a.json: has no rows."),
        ("", "a.json: has no rows."),
    ],
)
def test_json_when_it_is_wrong_then_the_error_names_the_position(text: str, found: str, write: Write, tmp_path: Path):
    assert error_of(write("a.json", text), tmp_path).startswith(found)


def test_parse_json_when_text_is_blank_then_reports_the_end():
    with pytest.raises(DataError, match=r"x\.csv line 2: tools: is not valid JSON: it ends in the middle"):
        parse_json("  ", "x.csv line 2: tools")


JSON_PIECES = st.sampled_from(
    [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b"\\ud800",
        b"NaN",
        b'"a"',
        b"1",
        b"\n",
        b"\xff",
        b"\0",
        b'{"a": 1}',
        b"e9",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(st.binary(max_size=200), st.lists(JSON_PIECES, max_size=30).map(b"".join)),
    suffix=st.sampled_from([".jsonl", ".json"]),
)
def test_any_bytes_when_read_as_json_then_are_rows_or_a_data_error(data: bytes, suffix: str, tmp_path: Path):
    assert_rows_or_data_error(tmp_path / f"any{suffix}", data)
