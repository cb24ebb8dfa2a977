"""Reads Arrow's files: .parquet, and .arrow as `save_to_disk` of Hugging Face's datasets writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.data.rows.row import Row
from weft.errors import DataError, MissingExtraError, first_line, install_command

ROWS_PER_BATCH = 1024
FILE_MAGIC = b"ARROW1"
"""First bytes of Arrow's file format; its stream format has others."""


def read_parquet(path: Path, name: str) -> Iterator[Row]:
    """The rows of a parquet file, in batches."""
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
        for first in range(0, batch.num_rows, ROWS_PER_BATCH):
            for values in batch.slice(first, ROWS_PER_BATCH).to_pylist():
                number += 1
                yield Row(values, f"{name} row {number}")


def _library(name: str, kind: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingExtraError(
            f"reading {kind} files needs pyarrow.", where=name, hint=f"Install it: {install_command('parquet')}."
        ) from None
    return pyarrow
