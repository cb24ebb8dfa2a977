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
    """Consecutive rows."""

    @property
    def num_bytes(self) -> int:
        """Size in the file; 0 if unknown."""
        ...

    def rows(self) -> list[Row]:
        """The rows; one that cannot be read is a DataError."""
        ...


@dataclass(frozen=True)
class RowChunk:
    """Rows that are parsed already."""

    read: list[Row]
    num_bytes: int = 0

    def rows(self) -> list[Row]:
        return self.read


@dataclass(frozen=True)
class LineChunk:
    """Lines of a jsonl file."""

    lines: list[bytes]
    name: str
    first_number: int
    """Line number of the first one."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.lines))

    @property
    def num_rows(self) -> int:
        """Lines that are not blank."""
        return sum(1 for line in self.lines if line.strip())

    def first_rows(self, number: int) -> LineChunk:
        ends = itertools.accumulate(bool(line.strip()) for line in self.lines)
        return replace(self, lines=[line for line, end in zip(self.lines, ends, strict=True) if end <= number])

    def rows(self) -> list[Row]:
        return list(rows_of_lines(self.lines, self.name, self.first_number))


def chunks_of(source: Source) -> Iterator[Chunk]:
    """All chunks of a source, file by file."""
    if source.is_lines:
        yield from line_chunks(source)
        return
    rows = source.rows()
    while read := list(itertools.islice(rows, ROWS_PER_CHUNK)):
        yield RowChunk(read)


def line_chunks(source: Source) -> Iterator[LineChunk]:
    """All chunks of a source of line files, up to its `max_rows`."""
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
