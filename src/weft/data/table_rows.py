"""Reads tables (.csv, .tsv) and plain text (.txt) a line at a time, and Arrow's files (.parquet, .arrow) in batches."""

from __future__ import annotations

import csv
import io
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.data.json_rows import MAX_LINE_BYTES
from weft.data.row import Row, kind_of, text_lines
from weft.errors import DataError, counted, first_line, needs_extra

_LIMIT_LOCK = threading.Lock()
"""Held while the csv module's limit, a setting of the whole process, is changed."""


def read_txt(path: Path, name: str) -> Iterator[Row]:
    """Paragraphs separated by blank lines; in a file without blank lines every line is a paragraph."""
    by_line = not _has_blank_line(path, name)
    paragraph: list[str] = []
    for number, line in enumerate(itertools.chain(text_lines(path, name), [""]), 1):
        if line.strip():
            # Before a line feed, a carriage return is part of the line's end.
            paragraph.append(line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line)
        if paragraph and (by_line or not line.strip()):
            first = number if by_line else number - len(paragraph)
            yield Row({"text": "\n".join(paragraph)}, f"{name} line {first}")
            paragraph = []


def _has_blank_line(path: Path, name: str) -> bool:
    has_blank = False
    for line in text_lines(path, name):
        if not line.strip():
            has_blank = True
        elif has_blank:
            return True
    return False


def read_table(path: Path, name: str, *, has_header: bool = True) -> Iterator[Row]:
    """A header line of column names, then one row per line; quoted cells may span lines."""
    delimiter, lines = _delimiter(path, _ended_lines(path, name))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        where = f"{name} line {reader.line_num + 1}"
        try:
            cells = _next_cells(reader)
        except csv.Error as error:
            raise DataError(f"is not a valid table: {error}.", where=f"{name} line {reader.line_num}") from None
        if cells is None:
            return
        if not any(cells):
            continue
        if not header:
            header = [cell.strip() if has_header else str(number) for number, cell in enumerate(cells, 1)]
            _refuse_doubles(header, where)
            if has_header:
                continue
        if len(cells) != len(header):
            first = "the header" if has_header else "the first line"
            raise DataError(f"has {counted(len(cells), 'cell')}; {first} has {len(header)}.", where=where)
        yield Row(dict(zip(header, cells, strict=True)), where)


def _next_cells(reader: Iterator[list[str]]) -> list[str] | None:
    """The cells of the next row, of which one may be larger than the module's limit of 128 KiB."""
    with _LIMIT_LOCK:
        limit = csv.field_size_limit(MAX_LINE_BYTES)
        try:
            return next(reader, None)
        finally:
            csv.field_size_limit(limit)


def _ended_lines(path: Path, name: str) -> Iterator[str]:
    """The lines of a table as the csv module counts them: a carriage return ends one, too."""
    for line in text_lines(path, name):
        if "\r" in line:
            yield from io.StringIO(line, newline="")
        else:
            yield line


def _delimiter(path: Path, lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """The separator of the cells, and all lines: tabs in a .tsv file, else commas, or that of the first line."""
    if kind_of(path) == ".tsv":
        return "\t", lines
    seen: list[str] = []
    for line in lines:
        seen.append(line)
        if line.strip():
            break
    first = next((part for line in seen for part in line.splitlines() if part.strip()), "")
    return next((mark for mark in (",", ";", "\t") if mark in first), ","), itertools.chain(seen, lines)


def _refuse_doubles(names: list[str], where: str) -> None:
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise DataError(f"two columns are named {double!r}.", where=where)


ROWS_PER_BATCH = 1024
FILE_MAGIC = b"ARROW1"
"""First bytes of Arrow's file format; its stream format has others."""


def read_parquet(path: Path, name: str) -> Iterator[Row]:
    pyarrow = _library(name, "parquet")
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from _rows(file.iter_batches(batch_size=ROWS_PER_BATCH), name)
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"is not a parquet file that can be read ({first_line(error)}).", where=name) from None


def read_arrow(path: Path, name: str) -> Iterator[Row]:
    """The rows of an Arrow file, in its file format or its stream format, mapped."""
    pyarrow = _library(name, "arrow")
    from pyarrow import ipc

    try:
        with path.open("rb") as file:
            is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        with pyarrow.memory_map(str(path)) as mapped:
            if is_file:
                reader = ipc.open_file(mapped)
                yield from _rows((reader.get_batch(i) for i in range(reader.num_record_batches)), name)
            else:
                yield from _rows(ipc.open_stream(mapped), name)
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"is not an arrow file that can be read ({first_line(error)}).", where=name) from None


def _rows(batches: Any, name: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        if number == 0:
            _refuse_doubles(batch.schema.names, name)
        for first in range(0, batch.num_rows, ROWS_PER_BATCH):
            for values in batch.slice(first, ROWS_PER_BATCH).to_pylist():
                number += 1
                yield Row(values, f"{name} row {number}")


def _library(name: str, kind: str) -> Any:
    with needs_extra("parquet", f"reading {kind} files needs pyarrow.", name):
        import pyarrow
    return pyarrow
