"""Reads tables (.csv, .tsv) and plain text (.txt)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from weft.data.rows.compression import kind_of
from weft.data.rows.json_rows import MAX_LINE_BYTES
from weft.data.rows.row import Row, read_text
from weft.errors import DataError


def read_txt(path: Path, name: str) -> Iterator[Row]:
    """Paragraphs separated by blank lines; in a file without blank lines every line is a paragraph."""
    lines = read_text(path, name).replace("\r\n", "\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    by_line = all(line.strip() for line in lines)
    paragraph: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            paragraph.append(line)
        if paragraph and (by_line or not line.strip()):
            first = number if by_line else number - len(paragraph)
            yield Row({"text": "\n".join(paragraph)}, f"{name} line {first}")
            paragraph = []


def read_table(path: Path, name: str, *, has_header: bool = True) -> list[Row]:
    """A header line of column names, then one row per line; quoted cells may span lines."""
    text = read_text(path, name)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(path, text), strict=True)
    rows: list[Row] = []
    header: list[str] = []
    # The module's limit of 128 KiB per cell is one setting for the whole process.
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        while True:
            where = f"{name} line {reader.line_num + 1}"
            cells = next(reader, None)
            if cells is None:
                return rows
            if not any(cells):
                continue
            if not header:
                header = _header(cells, where) if has_header else [str(i + 1) for i in range(len(cells))]
                if has_header:
                    continue
            if len(cells) != len(header):
                first = "the header" if has_header else "the first line"
                raise DataError(f"has {len(cells)} cells; {first} has {len(header)}.", where=where)
            rows.append(Row(dict(zip(header, cells, strict=True)), where))
    except csv.Error as error:
        raise DataError(f"is not a valid table: {error}.", where=f"{name} line {reader.line_num}") from None
    finally:
        csv.field_size_limit(limit)


def _delimiter(path: Path, text: str) -> str:
    """What separates the cells: tabs in a .tsv file, else commas, or what the first line has instead of them."""
    if kind_of(path) == ".tsv":
        return "\t"
    first = next((line for line in text.splitlines() if line.strip()), "")
    return next((mark for mark in (",", ";", "\t") if mark in first), ",")


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise DataError(f"two columns are named {double!r}.", where=where)
    return names
