"""Columns by the names that people gave them: `data_columns` says which of them is the prompt, the completion, …

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
"""Columns that keep their meaning beside those that are named."""
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


@dataclass(frozen=True)
class ColumnMap:
    """Which column of a row is which; empty: as they are named."""

    columns: Mapping[str, str | int]

    @property
    def by_number(self) -> bool:
        """Whether columns are numbered, because the tables have no line of names."""
        return any(isinstance(column, int) for column in self.columns.values())

    def apply(self, row: Row) -> Row:
        """The row with the columns that formats know; a column it does not have is a DataError."""
        if not self.columns:
            return row
        kept = {name: row.values[name] for name in KEPT if name in row.values}
        return Row(
            kept | {name: self._value(name, str(column), row) for name, column in self.columns.items()}, row.where
        )

    def _value(self, name: str, column: str, row: Row) -> Any:
        if column in row.values or not _PLACE.search(column):
            return _as_text(self._cell(name, column, row))
        return _PLACE.sub(lambda place: self._fill(name, place, row), column)

    def _fill(self, name: str, place: re.Match[str], row: Row) -> str:
        if place[1] is None:
            return place[0][0]
        value = _as_text(self._cell(name, place[1].strip(), row))
        return "" if value is None else str(value)

    def _cell(self, name: str, column: str, row: Row) -> Any:
        if column in row.values:
            return row.values[column]
        guess = closest(column, list(row.values))
        raise DataError(
            f"has no column {column}, which data_columns.{name} asks for; it has {', '.join(row.values) or 'none'}.",
            where=row.where,
            hint=f"Did you mean {guess}?" if guess else None,
        )


def _as_text(value: Any) -> Any:
    """A number as the text it is written as; lists and objects stay, for columns of messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value
