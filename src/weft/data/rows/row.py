"""One row of a data source and its location, and the decoding that all text files share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.rows.compression import open_data
from weft.errors import DataError

BOM = b"\xef\xbb\xbf"
NEWLINE = b"\n"


@dataclass(frozen=True)
class Row:
    """The columns of one row, and its location for errors."""

    values: Mapping[str, Any]
    where: str
    """E.g. `train.jsonl line 17` or `train.json row 3`."""


def read_text(path: Path, name: str) -> str:
    """The text of a UTF-8 file without its byte-order mark; other bytes are a DataError naming the line."""
    with open_data(path) as file:
        return decode(file.read().removeprefix(BOM), name)


def text_lines(path: Path, name: str) -> Iterator[str]:
    """The lines of such a file one by one, each with the line feed that ends it."""
    with open_data(path) as file:
        for number, line in enumerate(file, 1):
            yield decode(line.removeprefix(BOM) if number == 1 else line, name, number)


def decode(data: bytes, name: str, first_line: int = 1) -> str:
    """UTF-8 bytes as text; `first_line` is the line of the file they start on."""

    def line_of(at: int) -> str:
        return f"{name} line {first_line + data.count(NEWLINE, 0, at)}"

    at = data.find(b"\0")
    if at >= 0:
        raise DataError("has a NUL byte, as UTF-16 and binary files do; save it as UTF-8 text.", where=line_of(at))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"the byte 0x{data[error.start]:02x} is not UTF-8"
        raise DataError(f"{problem}; save the file as UTF-8 text.", where=line_of(error.start)) from None
