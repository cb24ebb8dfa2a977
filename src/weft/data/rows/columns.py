"""Typed access to the columns of a row: a missing or wrong one is a DataError naming the row and the column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.data.rows.json_rows import parse_json
from weft.data.rows.row import Row
from weft.errors import DataError
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
