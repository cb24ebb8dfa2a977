"""Opens data files unchanged or, by their last suffix, decompressed: .gz and .zst."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from weft.errors import MissingExtraError, install_command

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
        try:
            import zstandard
        except ImportError:
            raise MissingExtraError(
                "reading .zst files needs zstandard.", where=path.name, hint=f"Install it: {install_command('zstd')}."
            ) from None
        self._library = zstandard
        self._file = path.open("rb")
        self._frame: Any = None
        """Decompressor of the current frame; None between frames."""
        self._compressed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer with the next bytes; 0 at the end."""
        while not self._ready and self._advance():
            pass
        some, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)

    def _advance(self) -> bool:
        """Decompresses another block; False at the end of the file."""
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
"""Functions that open a compressed file, by its last suffix."""
