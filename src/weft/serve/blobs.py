"""The file store: it keeps blobs under names of our own, in a directory or behind any fsspec URL (s3://…, gs://…).

In a directory a blob is written to a temporary file, synced and renamed. Object stores show an object only when it is
complete. Names are random, so nothing a user sends becomes part of a path. Every error on the way to the bytes is
raised as a StorageError, whichever library it comes from.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from weft import faults
from weft.errors import StorageError, WeftError
from weft.serve.archives import pack
from weft.serve.errors import NotFound
from weft.store.atomic import TEMP_PREFIX, storage_errors, sync
from weft.store.remote.file_system import open_file_system

CHUNK_BYTES = 2**20
_NAME = re.compile(rf"[0-9a-f]{{2}}/({re.escape(TEMP_PREFIX)})?[0-9a-f]{{32}}(\.[a-z]{{1,12}})?")


class Blobs:
    """The blobs in a directory or behind a URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs: Any = None
        if "://" in url and not url.startswith("file://"):
            self._fs, self._root = open_file_system(url, "--store")
        else:
            self._root = str(Path(url.removeprefix("file://")).resolve())
            with storage_errors(Path(self._root)):
                Path(self._root).mkdir(parents=True, exist_ok=True)

    def create(self, suffix: str = "") -> BlobWriter:
        """Opens a new blob for writing; it exists from `commit` on."""
        token = secrets.token_hex(16)
        return BlobWriter(self, f"{token[:2]}/{token}{suffix}")

    def put(self, stream: IO[bytes] | Iterable[bytes] | bytes, suffix: str = "") -> str:
        """Stores a stream and returns its name."""
        with self.create(suffix) as writer:
            for chunk in _chunks(stream):
                writer.write(chunk)
            writer.commit()
            return writer.name

    def put_dir(self, directory: Path, suffix: str = ".zip") -> str:
        """Stores the files directly inside a directory as one archive; equal files make equal archives."""
        return self.put_files(sorted(directory.iterdir()), suffix)

    def put_files(self, paths: Iterable[Path], suffix: str = ".zip") -> str:
        """Stores files as one archive, each under its own name."""
        with self.create(suffix) as writer:
            pack(cast(IO[bytes], _BlobWriterStream(writer)), paths)
            writer.commit()
            return writer.name

    def open(self, name: str) -> IO[bytes]:
        """Opens a blob as a stream; raises NotFound if there is none."""
        place = self.place(name)
        with self.errors(name):
            if self._fs is None:
                return open(place, "rb")
            return io.BufferedReader(_RemoteBlobStream(self, name, self._fs.open(place, "rb")), CHUNK_BYTES)

    def size(self, name: str) -> int:
        """Returns the number of bytes of a blob; raises NotFound if there is none."""
        place = self.place(name)
        with self.errors(name):
            return os.path.getsize(place) if self._fs is None else int(self._fs.size(place))

    def fetch(self, name: str, path: Path) -> None:
        """Copies a blob to a new file."""
        with self.open(name) as source, storage_errors(path), path.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def delete(self, name: str) -> None:
        """Deletes a blob, finished or not; deleting a blob that is not there does nothing."""
        place = self.place(name)
        with contextlib.suppress(NotFound), self.errors(name):
            if self._fs is None:
                os.unlink(place)
            else:
                self._fs.rm_file(place)

    def names(self) -> Iterator[tuple[str, float]]:
        """Yields every blob, finished or not, with the time of its last write in unix seconds."""
        if self._fs is None:
            for path in sorted(Path(self._root).glob("??/*")):
                with contextlib.suppress(FileNotFoundError):
                    yield f"{path.parent.name}/{path.name}", path.stat().st_mtime
            return
        with self.errors("*"):
            found = list(self._fs.find(self._root))
        for place in found:
            name = "/".join(str(place).split("/")[-2:])
            with contextlib.suppress(NotFound), self.errors(name):
                yield name, self._fs.modified(place).timestamp()

    def is_within(self, directory: Path) -> bool:
        """Whether the blobs are in a directory below this one."""
        return self._fs is None and Path(self._root).is_relative_to(directory.resolve())

    def free_bytes(self) -> int | None:
        """Returns the free bytes of the disk, or None if they are unknown."""
        return shutil.disk_usage(self._root).free if self._fs is None else None

    def place(self, name: str) -> str:
        """Returns the path of a blob; raises NotFound for a name that was not made here."""
        if not _NAME.fullmatch(name):
            raise NotFound(f"{name!r} is not the name of a blob.")
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Makes NotFound of a missing blob inside the block, and StorageError of any other error."""
        try:
            yield
        except WeftError:
            raise
        except FileNotFoundError:
            raise NotFound(f"the blob {name} is not in the file store.") from None
        except Exception as error:  # libraries of object stores have errors of their own
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise StorageError(f"the file store does not answer ({reason}).", where=self.url) from error


class BlobWriter:
    """A blob being written: its bytes are counted and hashed, and it is deleted unless it is committed."""

    def __init__(self, blobs: Blobs, name: str) -> None:
        self.name = name
        self.num_bytes = 0
        self._blobs = blobs
        self._hash = hashlib.sha256()
        self._final = Path(blobs.place(name))
        self._temp = self._final.with_name(TEMP_PREFIX + self._final.name)
        self._committed = False
        self._file = self._open()

    @property
    def sha256(self) -> str:
        """SHA-256 of what was written so far."""
        return self._hash.hexdigest()

    def __enter__(self) -> BlobWriter:
        return self

    def _open(self) -> IO[bytes]:
        if self._blobs._fs is None:
            with storage_errors(self._final):
                self._final.parent.mkdir(exist_ok=True)
                return open(self._temp, "xb", buffering=0)
        # fsspec buffers and uploads in parts; the object appears when the stream is closed.
        with self._errors():
            return cast(IO[bytes], self._blobs._fs.open(self._blobs.place(self.name), "wb"))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """To whoever writes, a place that is not there is no missing blob."""
        with self._blobs.errors(self.name), storage_errors(self._final):
            yield

    def write(self, data: bytes) -> None:
        """Appends bytes."""
        self._hash.update(data)
        self.num_bytes += len(data)
        with self._errors():
            faults.point("blob.write")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]

    def commit(self) -> None:
        """The blob is there for good."""
        if self._blobs._fs is None:
            with storage_errors(self._final):
                faults.point("blob.commit")
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._temp, self._final)
                sync(self._final.parent)
                faults.point("blob.commit")
        else:
            with self._errors():
                self._file.close()
        self._committed = True

    def __exit__(self, *_: object) -> None:
        if self._committed:
            return
        if self._blobs._fs is None:
            self._file.close()
            # An error may come after the rename, and then no row will ever name the blob.
            for path in (self._temp, self._final):
                path.unlink(missing_ok=True)
        else:
            # A store that is away keeps what it has of the blob, but no row will ever name it.
            with contextlib.suppress(StorageError, NotFound), self._blobs.errors(self.name):
                self._discard()
                # Some file systems show an object from its first byte on.
                self._blobs.delete(self.name)

    def _discard(self) -> None:
        discard = getattr(self._file, "discard", self._file.close)
        discard()
        # Else fsspec would finish the upload when the stream is collected.
        with contextlib.suppress(AttributeError):
            self._file.closed = True  # type: ignore[misc]


class _RemoteBlobStream(io.RawIOBase):
    """A stream behind a URL that raises our own errors."""

    def __init__(self, blobs: Blobs, name: str, file: IO[bytes]) -> None:
        self._blobs, self._name, self._file = blobs, name, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._blobs.errors(self._name):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _BlobWriterStream(io.RawIOBase):
    """A blob writer as the file without seeking that zipfile needs."""

    def __init__(self, writer: BlobWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._writer.write(bytes(data))
        return len(data)


def _chunks(stream: IO[bytes] | Iterable[bytes] | bytes) -> Iterator[bytes]:
    if isinstance(stream, bytes):
        yield stream
    elif hasattr(stream, "read"):
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
    else:
        yield from stream
