"""Reads rows from what users have: the files that `READERS` names, or a data set of the Hugging Face Hub.

Every row knows its place (`train.jsonl line 17`), so that whatever is found wrong with it later can name it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.data.rows.json_rows import MAX_LINE_BYTES, read_json, read_jsonl
from weft.data.rows.row import Row, read_text
from weft.errors import DataError, MissingExtraError, closest, install_command

HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<split>[\w.\[\]:%+-]+))?")


@dataclass(frozen=True)
class Source:
    """A file or a Hub data set that can be read."""

    name: str
    """As the user wrote it."""
    path: Path | None
    """The file; None for a data set of the Hub."""
    has_header: bool = True
    """False for a table whose columns are named by their numbers, from 1."""

    def rows(self) -> Iterator[Row]:
        """The rows one by one; a source without any is a DataError."""
        is_empty = True
        with self.read_errors():
            for row in self._read():
                is_empty = False
                yield row
        if is_empty:
            raise self.no_rows()

    @contextlib.contextmanager
    def read_errors(self) -> Iterator[None]:
        """Turns operating system errors inside the block into one sentence about the source."""
        try:
            yield
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror or error}).", where=self.name) from None

    def no_rows(self) -> DataError:
        """The error for a source without rows."""
        return DataError("has no rows.", where=self.name)

    def _read(self) -> Iterable[Row]:
        if self.path is None:
            return _read_hub(self.name)
        if not self.has_header:
            return _read_table(self.path, self.name, has_header=False)
        return READERS[self.path.suffix.lower()](self.path, self.name)


def find_source(source: str, base_dir: Path, *, has_header: bool = True) -> Source:
    """The file, or the Hub data set named `owner/name` or `owner/name:split`; a DataError if it is neither.

    A relative path is relative to `base_dir`; errors name the source as the user wrote it.
    """
    path = base_dir / os.path.expanduser(source)
    suffix = path.suffix.lower()
    accepted = ", ".join(READERS)
    if os.path.isdir(path):
        raise DataError(f"is a directory; name its files ({accepted}).", where=source)
    if os.path.isfile(path):
        if suffix not in READERS:
            found = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
            raise DataError(f"has {found}; accepted are {accepted}.", where=source)
        if not has_header and suffix not in TABLES:
            raise DataError(f"is no table ({', '.join(TABLES)}), whose columns have numbers; name them.", where=source)
        return Source(source, path, has_header)
    if os.path.exists(path):
        raise DataError("is not a regular file.", where=source)
    if "://" in source:
        raise DataError("is a URL; download it and name the file, or name a Hub data set (owner/name).", where=source)
    if HUB_NAME.fullmatch(source) is None or suffix in READERS:
        raise DataError("there is no such file.", where=source, hint=_other_place(source, path, base_dir))
    return Source(source, None)


def read_rows(source: str, base_dir: Path, *, has_header: bool = True) -> list[Row]:
    """All rows of a file or Hub data set."""
    return list(find_source(source, base_dir, has_header=has_header).rows())


def _other_place(source: str, path: Path, base_dir: Path) -> str | None:
    """Where a file may be that is not where it was said to be."""
    try:
        files = {Path(name).stem: name for name in os.listdir(path.parent) if Path(name).suffix.lower() in READERS}
    except OSError:
        files = {}
    # Without the suffixes, which are alike whatever the names are.
    guess = closest(path.stem, list(files))
    if guess is not None:
        return f"Did you mean {Path(source).parent / files[guess]}?"
    is_elsewhere = not os.path.isabs(source) and base_dir.absolute() != Path.cwd()
    return f"Paths are relative to {base_dir}." if is_elsewhere else None


def _read_txt(path: Path, name: str) -> Iterator[Row]:
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


def _read_table(path: Path, name: str, *, has_header: bool = True) -> list[Row]:
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
    if path.suffix.lower() == ".tsv":
        return "\t"
    first = next((line for line in text.splitlines() if line.strip()), "")
    return next((mark for mark in (",", ";", "\t") if mark in first), ",")


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise DataError(f"two columns are named {double!r}.", where=where)
    return names


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise _missing("reading parquet files needs pyarrow.", name, "parquet") from None
    try:
        with parquet.ParquetFile(path) as file:
            values = file.read().to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"is not a parquet file that can be read ({_first_line(error)}).", where=name) from None
    for number, row in enumerate(values, 1):
        yield Row(row, f"{name} row {number}")


def _read_hub(source: str) -> Iterator[Row]:
    match = HUB_NAME.fullmatch(source)
    assert match is not None
    name, split = match["name"], match["split"] or "train"
    try:
        import datasets
    except ImportError:
        raise _missing(
            "there is no such file, and reading a Hugging Face data set needs datasets.", source, "hub"
        ) from None
    try:
        for number, row in enumerate(datasets.load_dataset(name, split=split), 1):
            yield Row(row, f"{source} row {number}")
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as error:
        found = f"is neither a file nor a Hub data set that can be read now ({_first_line(error)})"
        raise DataError(f"{found}; check the name, the split and the connection.", where=source) from None


def _missing(message: str, where: str, extra: str) -> MissingExtraError:
    return MissingExtraError(message, where=where, hint=f"Install it: {install_command(extra)}.")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


TABLES = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson")
READERS: dict[str, Callable[[Path, str], Iterable[Row]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
"""How to read a file, by its suffix."""
