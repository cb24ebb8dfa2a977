"""A source in chunks of rows; those of jsonl files are lines that are not parsed yet, so another process can do it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from weft.data.rows.json_rows import read_lines, rows_of_lines
from weft.data.rows.row import Row
from weft.data.rows.sources import DataFile, Source

ROWS_PER_CHUNK = 1024


class Chunk(Protocol):
    """Some rows in a row."""

    @property
    def num_bytes(self) -> int:
        """How much of the file it is; 0 where that is not known."""
        ...

    def rows(self) -> list[Row]:
        """The rows; one that cannot be read is a DataError."""
        ...


@dataclass(frozen=True)
class RowChunk:
    """Rows that are read already."""

    read: list[Row]
    num_bytes: int = 0

    def rows(self) -> list[Row]:
        """The rows."""
        return self.read


@dataclass(frozen=True)
class LineChunk:
    """Lines of a jsonl file."""

    lines: list[bytes]
    name: str
    first_number: int
    """The line of the file that the first one is."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all lines."""
        return sum(map(len, self.lines))

    @property
    def num_rows(self) -> int:
        """Lines that are not blank."""
        return sum(1 for line in self.lines if line.strip())

    def first_rows(self, number: int) -> LineChunk:
        """The lines up to so many rows."""
        ends = itertools.accumulate(bool(line.strip()) for line in self.lines)
        return replace(self, lines=[line for line, end in zip(self.lines, ends, strict=True) if end <= number])

    def rows(self) -> list[Row]:
        """The rows of the lines that are not blank."""
        return list(rows_of_lines(self.lines, self.name, self.first_number))


def chunks_of(source: Source) -> Iterator[Chunk]:
    """All of a source, file by file."""
    if source.is_lines:
        yield from line_chunks(source)
        return
    rows = source.rows()
    while read := list(itertools.islice(rows, ROWS_PER_CHUNK)):
        yield RowChunk(read)


def line_chunks(source: Source) -> Iterator[LineChunk]:
    """All of a source that is files of lines, as far as its rows are wanted."""
    left = source.max_rows
    for file in source.files:
        for chunk in _file_chunks(file):
            if left is None:
                yield chunk
                continue
            some = chunk.first_rows(left)
            left -= some.num_rows
            yield some
            if not left:
                return


def _file_chunks(file: DataFile) -> Iterator[LineChunk]:
    number = 1
    with file.read_errors():
        lines = read_lines(file.path)
        while some := list(itertools.islice(lines, ROWS_PER_CHUNK)):
            yield LineChunk(some, file.name, number)
            number += len(some)
