import math

import pytest

from weft.store import json_text


def test_parse_when_dumped_then_gives_the_value_back():
    value = {"a": [1, -0.0, 1e-300, None, True], "ü": {"b": "\ud800"}}
    assert json_text.parse(json_text.dump(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": NaN}', "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "1e999"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is repeated"),
        (b"\xff{}", "UTF-8"),
        (b"[1,\n2", "line 2"),
        (b'{\n"a', "Unterminated string starting at line 2"),
        (b"", "Expecting value"),
        (b"[" * 100_000, "deeply"),
        (b"1" * 5000, "4300"),
    ],
)
def test_parse_when_text_is_invalid_json_then_names_the_problem(text, reason):
    with pytest.raises(ValueError, match=reason):
        json_text.parse(text)


def test_dump_when_a_number_is_not_finite_then_refuses():
    with pytest.raises(ValueError, match="JSON"):
        json_text.dump({"loss": math.nan})


def test_finite_when_values_are_not_then_they_become_null():
    assert json_text.finite({"a": math.inf, "b": [math.nan, 1.5], "c": (2,)}) == {"a": None, "b": [None, 1.5], "c": [2]}
