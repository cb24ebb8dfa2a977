"""Collects samples chunk by chunk in flat arrays, in memory or in numpy's own files, and reads those files again.

Arrays in files take no memory while they grow; afterwards they are mapped.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from weft.data.samples import Samples, TokenArrays
from weft.errors import DataError

FILLED_TOGETHER = 2**20
"""Values that are written at a time after tokens that had none."""
OPTIONAL: dict[str, tuple[type, float]] = {"weights": (np.float64, 1.0), "labels": (np.float32, np.nan)}
"""Columns that only some samples have: their type, and the value for tokens of the others."""
TEACHER: dict[str, type] = {"teacher_ids": np.int32, "teacher_logprobs": np.float32}
"""Columns that all samples have or none, with several values per supervised token."""


class Column(Protocol):
    """An array that grows."""

    def append(self, values: npt.NDArray[Any]) -> None: ...

    def finish(self) -> npt.NDArray[Any]:
        """All values, read-only."""
        ...

    def close(self) -> None:
        """Closes open files; nothing can be added then."""
        ...


class MemoryColumn:
    """An array that grows in memory."""

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
    """An array that grows in a .npy file."""

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
        """Values per supervised token in the columns of a teacher."""
        self._digest = hashlib.sha256()
        self._range: tuple[int, int] | None = None

    def append(self, samples: Samples, rows: npt.NDArray[np.int64]) -> None:
        """Adds consecutive samples of their own arrays, and the rows of their groups."""
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
