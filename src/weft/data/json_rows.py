"""Reads jsonl and json files strictly: values that `json.loads` accepts by accident are refused with their line.

Refused besides invalid JSON: NaN and Infinity, a key given twice in one object, half of a surrogate pair (it has no
UTF-8 form), nesting past Python's recursion limit, numbers of thousands of digits, and lines over 8 MiB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.row import BOM, Row, decode, open_data, read_text
from weft.errors import DataError, did_you_mean
from weft.settings import describe

MAX_LINE_BYTES = 8 * 2**20

# Lists that are columns of a row, so an object that holds only such a list is a row and not a file of rows.
COLUMNS_WITH_LISTS = ("messages", "conversations", "prompt", "completion")

_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class _FlawError(ValueError):
    """A problem of a piece of JSON, with its character if that is known."""

    def __init__(self, message: str, at: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.at = at


def parse_json(text: str, where: str) -> Any:
    """The value of a strict JSON text; anything else is a DataError at `where`."""
    try:
        value, end = _decode_value(text, _skip_space(text, 0))
        _expect_end(text, end)
        return value
    except _FlawError as flaw:
        raise DataError(_with_column(text, flaw), where=where) from None


def read_jsonl(path: Path, name: str) -> Iterator[Row]:
    return rows_of_lines(read_lines(path), name)


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, up to the first that is too long, which is cut off after the limit."""
    with open_data(path) as handle:
        while line := handle.readline(MAX_LINE_BYTES + 1):
            yield line
            if len(line) > MAX_LINE_BYTES:
                return


def rows_of_lines(lines: Iterable[bytes], name: str, first_number: int = 1) -> Iterator[Row]:
    """The rows of a jsonl file's lines; the first line has the number `first_number`."""
    for number, line in enumerate(lines, first_number):
        where = f"{name} line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"is longer than {MAX_LINE_BYTES // 2**20} MiB.", where=where)
        text = decode(line.removeprefix(BOM) if number == 1 else line, name, number)
        if text.isspace() or not text:
            continue
        if number == 1 and text.startswith("["):
            raise DataError("a jsonl file has one object per line; name a file that is one list .json.", where=where)
        yield _row(parse_json(text, where), where)


def read_json(path: Path, name: str) -> Iterator[Row]:
    """The rows of a json file: a list of objects, an object that holds one such list, or lines of objects."""
    text = read_text(path, name)
    start = _skip_space(text, 0)
    if start == len(text):
        return
    if text[start] == "[":
        yield from _list_rows(text, start, name)
        return
    try:
        value, end = _decode_value(text, start)
    except _FlawError as flaw:
        raise _at_line(text, flaw, name) from None
    if _skip_space(text, end) < len(text):
        # Many files called .json are lines of objects.
        yield from read_jsonl(path, name)
        return
    yield from _object_rows(value, name)


def _list_rows(text: str, start: int, name: str) -> Iterator[Row]:
    """Decodes a list item by item, so that an error can name its row."""
    index, number = _skip_space(text, start + 1), 0
    mark = text[index : index + 1]
    try:
        while mark != "]":
            number += 1
            value, index = _decode_value(text, index)
            yield _row(value, f"{name} row {number}")
            index = _skip_space(text, index)
            mark = text[index : index + 1]
            if mark == ",":
                index = _skip_space(text, index + 1)
            elif mark != "]":
                problem = f"expected ',' or ']' after row {number}" if mark else "it ends before the list is closed"
                raise _FlawError(f"is not valid JSON: {problem}", index)
        _expect_end(text, index + 1)
    except _FlawError as flaw:
        raise _at_line(text, flaw, name, f"{name} row {number}") from None


def _object_rows(value: Any, name: str) -> Iterator[Row]:
    where = f"{name} row 1"
    lists = {key: item for key, item in _row(value, name).values.items() if _is_list_of_objects(item)}
    if len(lists) != 1:
        problem = f"an object with {len(lists)} lists of rows" if lists else "an object without a list of rows"
        raise DataError(f"holds {problem}; expected a list of objects, or an object with one such list.", where=name)
    key, items = lists.popitem()
    if key in COLUMNS_WITH_LISTS:
        yield Row(value, where)
        return
    for number, item in enumerate(items, 1):
        yield Row(item, f"{name} row {number}")


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f'is {describe(value)}; each row is an object such as {{"text": "..."}}.', where=where)
    return Row(value, where)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _FlawError(f"the key {describe(key)} appears twice in one object")
        values[key] = value
    return values


def _no_constant(word: str) -> Any:
    raise _FlawError(f"{word} is not valid JSON; write a number or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _decode_value(text: str, start: int) -> tuple[Any, int]:
    """The value that starts at `start`, and its end; any problem is a _FlawError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _SURROGATE_ESCAPE.search(text, start, end):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value, end
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or _skip_space(text, error.pos) == len(text)
        problem = "it ends in the middle of a value" if cut else error.msg[:1].lower() + error.msg[1:]
        raise _FlawError(f"is not valid JSON: {problem}", error.pos) from None
    except UnicodeEncodeError:
        raise _FlawError(
            r"has half of a surrogate pair (a \ud800 to \udfff escape on its own), which is no character"
        ) from None
    except RecursionError:
        raise _FlawError("is nested too deeply") from None
    except _FlawError:
        raise
    except ValueError:
        # The one other ValueError of the decoder: Python's limit on the digits of a whole number.
        raise _FlawError("has a number with too many digits") from None


def _expect_end(text: str, index: int) -> None:
    index = _skip_space(text, index)
    if index < len(text):
        raise _FlawError("is not valid JSON: there is more after its end", index)


def _skip_space(text: str, index: int) -> int:
    match = _SPACE.match(text, index)
    return match.end() if match else index


def _with_column(text: str, flaw: _FlawError) -> str:
    if flaw.at is None:
        return f"{flaw.message}."
    return f"{flaw.message} (column {flaw.at - text.rfind(chr(10), 0, flaw.at)})."


def _at_line(text: str, flaw: _FlawError, name: str, row: str | None = None) -> DataError:
    """The error at the line of the flaw, or at the row when only that is known."""
    if flaw.at is None:
        return DataError(f"{flaw.message}.", where=row or name)
    return DataError(_with_column(text, flaw), where=f"{name} line {text.count(chr(10), 0, flaw.at) + 1}")


def has(row: Row, *names: str) -> bool:
    """True if the row has all these columns; a null counts as absent, because parquet fills gaps with nulls."""
    values = row.values
    for name in names:  # noqa: SIM110  # called a dozen times a row, and twice as fast as all(...)
        if values.get(name) is None:
            return False
    return True


def absence(row: Row, name: str) -> str:
    """`null` for a column without a value, `missing` for none."""
    return "null" if name in row.values else "missing"


def text_column(row: Row, name: str, default: str | None = None) -> str:
    """The text of a column; without a default the column must be there."""
    value = row.values.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise DataError(f"{name} is {absence(row, name)}.", where=row.where)
    return expect_text(value, name, row.where)


def list_column(row: Row, name: str) -> list[Any]:
    """The list in a column; csv has no lists, so text is read as JSON."""
    value = row.values.get(name)
    if value is None:
        raise DataError(f"{name} is {absence(row, name)}.", where=row.where)
    if isinstance(value, str):
        value = parse_json(value, f"{row.where}: {name}")
    return expect_list(value, name, row.where)


def expect_text(value: Any, path: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{path} is {describe(value)}; expected text.", where=where)
    return value


def expect_list(value: Any, path: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{path} is {describe(value)}; expected a list.", where=where)
    return value


def expect_object(value: Any, path: str, where: str) -> Mapping[str, Any]:
    """The value if it is an object, without its null fields."""
    if not isinstance(value, Mapping):
        raise DataError(f"{path} is {describe(value)}; expected an object.", where=where)
    return {key: item for key, item in value.items() if item is not None}


KEPT = ("weight", "tools")
"""Columns that keep their meaning besides those that are named."""
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


@dataclass(frozen=True)
class ColumnMap:
    """Map from Weft's columns to those of a row; empty if names are used unchanged."""

    columns: Mapping[str, str | int]

    @property
    def by_number(self) -> bool:
        """True if columns are numbered, because the tables have no line of names."""
        return any(isinstance(column, int) for column in self.columns.values())

    def apply(self, row: Row) -> Row:
        """The row with Weft's columns; a missing column is a DataError."""
        if not self.columns:
            return row
        kept = {name: row.values[name] for name in KEPT if name in row.values}
        return Row(
            kept | {name: self._value(name, str(column), row) for name, column in self.columns.items()}, row.where
        )

    def _value(self, name: str, column: str, row: Row) -> Any:
        if column in row.values or not _FIELD.search(column):
            return _as_text(self._cell(name, column, row))
        return _FIELD.sub(lambda match: self._fill(name, match, row), column)

    def _fill(self, name: str, match: re.Match[str], row: Row) -> str:
        if match[1] is None:
            return match[0][0]
        value = _as_text(self._cell(name, match[1].strip(), row))
        return "" if value is None else str(value)

    def _cell(self, name: str, column: str, row: Row) -> Any:
        if column in row.values:
            return row.values[column]
        raise DataError(
            f"has no column {column}, which data_columns.{name} needs; it has {', '.join(row.values) or 'none'}.",
            where=row.where,
            hint=did_you_mean(column, row.values),
        )


def _as_text(value: Any) -> Any:
    """A number as the text it is written as; lists and objects stay, for columns of messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value
