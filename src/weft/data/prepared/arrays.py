"""Collects samples chunk by chunk in flat arrays, in memory or in numpy's own files, and reads those files again.

Arrays in files take no memory while they grow; afterwards they are mapped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from weft.data.dataset import Dataset, DataSummary
from weft.data.samples import Samples, TokenArrays
from weft.errors import DataError
from weft.objectives.registry import OBJECTIVES

FILLED_TOGETHER = 2**20
"""Values that are written at a time after tokens that had none."""
OPTIONAL: dict[str, tuple[type, float]] = {"weights": (np.float64, 1.0), "labels": (np.float32, np.nan)}
"""Columns that only some samples have: their type, and the value for tokens of the others."""
TEACHER: dict[str, type] = {"teacher_ids": np.int32, "teacher_logprobs": np.float32}
"""Columns that all samples have or none, with several values per supervised token."""


class Column(Protocol):
    """An array that grows."""

    def append(self, values: npt.NDArray[Any]) -> None: ...

    def finish(self) -> npt.NDArray[Any]: ...

    def close(self) -> None: ...


class MemoryColumn:
    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._pieces = [np.empty(0, dtype)]

    def append(self, values: npt.NDArray[Any]) -> None:
        self._pieces.append(values.astype(self._pieces[0].dtype, copy=False))

    def finish(self) -> npt.NDArray[Any]:
        whole = np.concatenate(self._pieces)
        whole.setflags(write=False)
        return whole

    def close(self) -> None:
        self._pieces.clear()


class FileColumn:
    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._path, self._dtype, self._number = path, np.dtype(dtype).newbyteorder("<"), 0
        self._file: BinaryIO = path.open("wb")
        self._write_header()

    def append(self, values: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._number += len(values)

    def finish(self) -> npt.NDArray[Any]:
        self._file.seek(0)
        # numpy leaves room in a header for its first axis to grow.
        self._write_header()
        self.close()
        return open_column(self._path)

    def close(self) -> None:
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._number,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def open_column(path: Path) -> npt.NDArray[Any]:
    """Maps a written array; a file without values cannot be mapped and is read."""
    try:
        result: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        result = np.load(path, allow_pickle=False)
    # Slices of a plain array are made several times faster than those of a `memmap`.
    return result.view(np.ndarray)


class SampleColumns:
    """The columns of samples, in a folder or, without one, in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._all: list[Column] = []
        self._tokens = self._column("tokens", np.int32)
        self._supervised = self._column("supervised", np.bool_)
        self._optional: dict[str, Column] = {}
        self._lengths = self._column("lengths", np.int64)
        self._num_supervised = self._column("num_supervised", np.int64)
        self._rows = self._column("rows", np.int64)
        self._num_tokens = 0
        self._num_teacher_tokens = 0
        self._digest = hashlib.sha256()
        self._range: tuple[int, int] | None = None

    def append(self, samples: Samples, rows: npt.NDArray[np.int64]) -> None:
        if not len(samples):
            return
        arrays = samples.arrays
        samples.feed(self._digest)
        smallest, largest = arrays.token_range
        before = self._range or arrays.token_range
        self._range = min(before[0], smallest), max(before[1], largest)
        for name in OPTIONAL:
            self._append_optional(name, getattr(arrays, name), len(arrays.tokens))
        self._append_teacher(arrays)
        self._tokens.append(arrays.tokens)
        self._supervised.append(arrays.supervised)
        self._lengths.append(samples.lengths)
        self._num_supervised.append(samples.num_supervised)
        self._rows.append(rows)
        self._num_tokens += len(arrays.tokens)

    def finish(self) -> tuple[Samples, npt.NDArray[np.int64]]:
        optional = {name: column.finish() for name, column in self._optional.items()}
        arrays = TokenArrays(self._tokens.finish(), self._supervised.finish(), **optional, cached_range=self._range)
        fingerprint = self._digest.hexdigest()
        return _samples(arrays, self._lengths.finish(), self._num_supervised.finish(), fingerprint), self._rows.finish()

    def close(self) -> None:
        for column in self._all:
            column.close()

    def _column(self, name: str, dtype: npt.DTypeLike) -> Column:
        made = MemoryColumn(dtype) if self._folder is None else FileColumn(self._folder / f"{name}.npy", dtype)
        self._all.append(made)
        return made

    def _append_optional(self, name: str, values: npt.NDArray[Any] | None, number: int) -> None:
        """Adds a column's values, or its default; a column begins with the first samples that have it."""
        dtype, absent = OPTIONAL[name]
        if values is not None and name not in self._optional:
            self._optional[name] = self._column(name, dtype)
            self._fill(self._optional[name], absent, self._num_tokens)
        if values is not None:
            self._optional[name].append(values)
        elif name in self._optional:
            self._fill(self._optional[name], absent, number)

    def _append_teacher(self, arrays: TokenArrays) -> None:
        """Adds the outputs of teachers; the number of tokens must be that of the samples before."""
        if self._num_tokens and arrays.num_teacher_tokens != self._num_teacher_tokens:
            numbers = f"{self._num_teacher_tokens} and {arrays.num_teacher_tokens}"
            problem = f"rows hold {numbers} tokens of their teachers for each token"
            raise DataError(f"{problem}; give all the same number.")
        self._num_teacher_tokens = arrays.num_teacher_tokens
        for name, dtype in TEACHER.items() if self._num_teacher_tokens else ():
            if name not in self._optional:
                self._optional[name] = self._column(name, dtype)
            self._optional[name].append(getattr(arrays, name))

    def _fill(self, column: Column, value: float, number: int) -> None:
        for first in range(0, number, FILLED_TOGETHER):
            column.append(np.full(min(FILLED_TOGETHER, number - first), value))


def open_samples(
    folder: Path, cached_range: tuple[int, int], cached_fingerprint: str
) -> tuple[Samples, npt.NDArray[np.int64]]:
    """Maps samples that were written to a folder, and the row of every group."""
    paths = {name: folder / f"{name}.npy" for name in (*OPTIONAL, *TEACHER)}
    optional = {name: open_column(path) for name, path in paths.items() if path.exists()}
    tokens, supervised = open_column(folder / "tokens.npy"), open_column(folder / "supervised.npy")
    arrays = TokenArrays(tokens, supervised, **optional, cached_range=cached_range)
    lengths, num_supervised = open_column(folder / "lengths.npy"), open_column(folder / "num_supervised.npy")
    return _samples(arrays, lengths, num_supervised, cached_fingerprint), open_column(folder / "rows.npy")


def _samples(
    arrays: TokenArrays, lengths: npt.NDArray[Any], num_supervised: npt.NDArray[Any], fingerprint: str
) -> Samples:
    return Samples.consecutive(arrays, lengths, num_supervised, fingerprint)


PAGE = "entry.json"
USED = "used"
"""A file whose time is the time of last use."""
ALWAYS_READ_BYTES = 64 * 2**20
"""Files up to this size are compared with their checksums each time."""
READ_BYTES = 2**22


def write_entry(folder: Path, data: Dataset) -> None:
    """Completes a folder that holds the arrays of `data`; afterwards all of it is durable."""
    files = {path.name: _described(path) for path in sorted(folder.glob("*.npy"))}
    page = {
        "summary": dataclasses.asdict(data.summary),
        "objective": data.objective.name,
        "source_groups": data.sizes,
        "has_rows": data.rows is not None,
        "fingerprint": data.fingerprint,
        "token_range": data.samples.arrays.token_range,
        "files": files,
        "created": time.time(),
    }
    (folder / USED).touch()
    (folder / PAGE).write_text(sealed("page", page))
    for name in (*files, PAGE):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def read_entry(folder: Path) -> Dataset | None:
    """The data of an entry, its arrays mapped; None if it is broken or missing."""
    try:
        page = read_page(folder)
        if page is None or not all(_is_sound(folder / name, stated) for name, stated in page["files"].items()):
            return None
        samples, rows = open_samples(folder, tuple(page["token_range"]), page["fingerprint"])
        summary = page["summary"]
        summary = DataSummary(**{**summary, "sources": tuple(summary["sources"]), "notes": tuple(summary["notes"])})
        sizes = tuple(page["source_groups"])
        return Dataset(samples, summary, OBJECTIVES[page["objective"]], sizes, rows if page["has_rows"] else None)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def read_page(folder: Path) -> dict[str, Any] | None:
    return unsealed(folder / PAGE, "page")


def sealed(name: str, value: dict[str, Any]) -> str:
    """A JSON text of a value by this name, with its checksum."""
    text = json.dumps(value)
    return json.dumps({name: text, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def unsealed(path: Path, name: str) -> dict[str, Any] | None:
    """The value in a file of such a text; None if it cannot be read or has changed."""
    try:
        whole = json.loads(path.read_text())
        value: dict[str, Any] = json.loads(whole[name])
        return value if whole["sha256"] == hashlib.sha256(whole[name].encode()).hexdigest() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _described(path: Path) -> dict[str, int]:
    result = path.stat()
    return {"bytes": result.st_size, "mtime_ns": result.st_mtime_ns, "crc32": _checksum(path)}


def _is_sound(path: Path, stated: dict[str, int]) -> bool:
    result = path.stat()
    if result.st_size != stated["bytes"]:
        return False
    is_untouched = result.st_mtime_ns == stated["mtime_ns"]
    return (is_untouched and result.st_size > ALWAYS_READ_BYTES) or _checksum(path) == stated["crc32"]


def _checksum(path: Path) -> int:
    result = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            result = zlib.crc32(block, result)
    return result
