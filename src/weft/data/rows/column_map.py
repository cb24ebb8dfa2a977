"""Renames columns: `data_columns` maps prompt, completion, … to the columns of the data.

A value is the name of a column, the number of one in a table without a line of names, or a text with columns in braces,
such as `Classify: {sentence}`; `{{` and `}}` stand for braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.data.rows.row import Row
from weft.errors import DataError, closest

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
