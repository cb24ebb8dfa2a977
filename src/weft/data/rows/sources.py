"""Reads rows from files of the kinds in `READERS`, or from a data set of the Hugging Face Hub.

Names of the Hub are `owner/name`, `owner/name:split` or `owner/name:config:split`.

Every row has its location (`train.jsonl line 17`), so that later errors can name it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.data.rows.compression import is_compressed, kind_of
from weft.data.rows.json_rows import read_json, read_jsonl
from weft.data.rows.row import Row
from weft.data.rows.table_rows import read_arrow, read_parquet, read_table, read_txt
from weft.errors import DataError, MissingExtraError, first_line, install_command

HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"((:(?P<config>[\w.+-]+))?:(?P<split>([\w.+-]|\[[\w:%+-]*\])+))?"
)
NO_CONFIG = "Config name is missing"
"""Message of `datasets` for a data set with several configurations."""


def read_hub(source: str, max_rows: int | None = None) -> Iterator[Row]:
    """The rows of a data set; if only the first are needed, they are streamed and the rest is not downloaded."""
    match = HUB_NAME.fullmatch(source)
    assert match is not None
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(
            "there is no such file, and reading a Hugging Face data set needs datasets.",
            where=source,
            hint=f"Install it: {install_command('hub')}.",
        ) from None
    name, split = match["name"], match["split"] or "train"
    try:
        result = datasets.load_dataset(name, match["config"], split=split, streaming=max_rows is not None)
        for number, row in enumerate(result, 1):
            yield Row(row, f"{source} row {number}")
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as error:
        if NO_CONFIG in str(error):
            raise _no_config(source, name, split, str(error)) from None
        raise DataError(
            f"is neither a file nor a Hub data set that can be read now ({first_line(error)}); check the name, the "
            "split and the connection.",
            where=source,
        ) from None


def _no_config(source: str, name: str, split: str, message: str) -> DataError:
    listed = re.search(r"\[([^\]]*)\]", message)
    configs = re.findall(r"'([^']*)'", listed[1]) if listed else []
    which = f" ({', '.join(configs)})" if configs else ""
    example = f"{name}:{configs[0] if configs else 'CONFIG'}:{split}"
    return DataError(f"has several configurations{which}; name one before the split, such as {example}.", where=source)


@dataclass(frozen=True)
class DataFile:
    """One file of rows."""

    name: str
    """Name as the user wrote it; for a file of a folder, followed by its own name."""
    path: Path
    has_header: bool = True
    """False for a table whose columns are named by their numbers, from 1."""

    @property
    def kind(self) -> str:
        """The suffix that decides how its rows are read."""
        return kind_of(self.path)

    @property
    def is_lines(self) -> bool:
        """True if every line is a row that can be read by itself."""
        return self.kind in JSON_LINES

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def num_text_bytes(self) -> int:
        """Approximate size as text."""
        return self.num_bytes * (TEXT_PER_COMPRESSED if is_compressed(self.path) else 1)

    def rows(self) -> Iterator[Row]:
        with self.read_errors():
            if self.kind in TABLES:
                yield from read_table(self.path, self.name, has_header=self.has_header)
            else:
                yield from READERS[self.kind](self.path, self.name)

    @contextlib.contextmanager
    def read_errors(self) -> Iterator[None]:
        """Turns errors of the operating system and of decompression inside the block into one sentence."""
        try:
            yield
        except (OSError, EOFError, zlib.error) as error:
            result = (isinstance(error, OSError) and error.strerror) or str(error)
            raise DataError(f"cannot be read ({result}).", where=self.name) from None


@dataclass(frozen=True)
class Source:
    """A data source that a user named: consecutive files, or a data set of the Hub."""

    name: str
    files: tuple[DataFile, ...]
    """Its files; None for a data set of the Hub."""
    max_rows: int | None = None
    """Maximum number of rows to read, from the front."""

    @property
    def is_on_hub(self) -> bool:
        return not self.files

    @property
    def is_lines(self) -> bool:
        """True if all of it is files of lines, each a row."""
        return not self.is_on_hub and all(file.is_lines for file in self.files)

    def rows(self) -> Iterator[Row]:
        """The rows one by one; a source without any is a DataError."""
        is_empty = True
        every = read_hub(self.name, self.max_rows) if self.is_on_hub else self._file_rows()
        for row in itertools.islice(every, self.max_rows):
            is_empty = False
            yield row
        if is_empty:
            raise self.no_rows()

    def _file_rows(self) -> Iterator[Row]:
        for file in self.files:
            yield from file.rows()

    def no_rows(self) -> DataError:
        return DataError("has no rows.", where=self.name)


TEXT_PER_COMPRESSED = 4
"""Average bytes of text per compressed byte."""
TABLES = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson")
READERS: dict[str, Callable[[Path, str], Iterable[Row]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_table,
    ".tsv": read_table,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_txt,
}
"""Readers of a file, by its suffix."""
BINARY = (".parquet", ".arrow")
"""Files that are compressed inside, if at all."""
