"""Renames columns: `data_columns` maps prompt, completion, … to the columns of the data.

A value is the name of a column, the number of one in a table without a line of names, or a text with columns in braces,
such as `Classify: {sentence}`; `{{` and `}}` stand for braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.data.rows.json_rows import parse_json
from weft.data.rows.row import Row
from weft.errors import DataError, closest
from weft.settings.fields import describe


def has(row: Row, *names: str) -> bool:
    """True if the row has all these columns; a null counts as absent, because parquet fills gaps with nulls."""
    values = row.values
    for name in names:  # noqa: SIM110  # called a dozen times a row, and twice as fast as all(...)
        if values.get(name) is None:
            return False
    return True


def text_column(row: Row, name: str, default: str | None = None) -> str:
    """The text of a column; without a default the column must be there."""
    value = row.values.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise DataError(f"{name} is missing.", where=row.where)
    return expect_text(value, name, row.where)


def list_column(row: Row, name: str) -> list[Any]:
    """The list in a column; csv has no lists, so text is read as JSON."""
    value = row.values.get(name)
    if value is None:
        raise DataError(f"{name} is missing.", where=row.where)
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
        guess = closest(column, list(row.values))
        raise DataError(
            f"has no column {column}, which data_columns.{name} needs; it has {', '.join(row.values) or 'none'}.",
            where=row.where,
            hint=f"Did you mean {guess}?" if guess else None,
        )


def _as_text(value: Any) -> Any:
    """A number as the text it is written as; lists and objects stay, for columns of messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value
