"""One row of a data source and its location, and the decoding that all text files share."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from weft.errors import DataError, needs_extra

BOM = b"\xef\xbb\xbf"
NEWLINE = b"\n"


@dataclass(frozen=True)
class Row:
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


BLOCK_BYTES = 2**17


def open_data(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed; what is damaged raises OSError, EOFError or zlib.error while it is read."""
    opened = OPENERS.get(path.suffix.lower())
    return path.open("rb") if opened is None else opened(path)


def kind_of(path: Path) -> str:
    """The suffix of a file's contents, in lower case: .jsonl for train.jsonl.gz."""
    inner = path.with_suffix("") if is_compressed(path) else path
    return inner.suffix.lower()


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in OPENERS


class _ZstdStream(io.RawIOBase):
    """All frames of a .zst file; an incomplete frame is an EOFError, which the library itself ignores."""

    def __init__(self, path: Path) -> None:
        with needs_extra("zstd", "reading .zst files needs zstandard.", path.name):
            import zstandard
        self._library = zstandard
        self._file = path.open("rb")
        self._frame: Any = None
        """Decompressor of the current frame; None between frames."""
        self._compressed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._advance():
            pass
        some, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)

    def _advance(self) -> bool:
        block = self._compressed or self._file.read(BLOCK_BYTES)
        if not block:
            if self._frame is not None:
                raise EOFError("it ends in the middle of a frame")
            return False
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=2**31).decompressobj()
        try:
            self._ready = self._frame.decompress(block)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from None
        self._compressed = b""
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None
        return True

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        super().close()


OPENERS: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": lambda path: cast(BinaryIO, gzip.GzipFile(path, "rb")),
    ".zst": lambda path: io.BufferedReader(_ZstdStream(path), BLOCK_BYTES),
}
