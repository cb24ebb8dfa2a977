"""A source in chunks of rows; those of jsonl files are lines that are not parsed yet, so another process can do it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from weft.data.rows.json_rows import read_lines, rows_of_lines
from weft.data.rows.row import Row
from weft.data.rows.sources import JSON_LINES, Source

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

    def rows(self) -> list[Row]:
        """The rows of the lines that are not blank."""
        return list(rows_of_lines(self.lines, self.name, self.first_number))


def chunks_of(source: Source) -> Iterator[Chunk]:
    """All of a source."""
    if source.path is None or source.path.suffix.lower() not in JSON_LINES:
        rows = source.rows()
        while read := list(itertools.islice(rows, ROWS_PER_CHUNK)):
            yield RowChunk(read)
        return
    number = 1
    with source.read_errors():
        lines = read_lines(source.path)
        while some := list(itertools.islice(lines, ROWS_PER_CHUNK)):
            yield LineChunk(some, source.name, number)
            number += len(some)
