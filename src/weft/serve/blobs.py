"""The file store: it keeps blobs under names of our own, in a directory or at any fsspec URL (s3://…, gs://…).

In a directory a blob is written to a temporary file, synced and renamed. Object stores show an object only when it is
complete. What is read is checked: files by the SHA-256 in their row, archives by their own checksums. Names are random,
so nothing a user sends becomes part of a path. Every error on the way to the bytes is raised as a StorageError,
whichever library it comes from. Directories are stored as zip archives without folders and times, so equal files make
equal archives.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import shutil
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from weft.errors import StorageError, WeftError
from weft.serve.errors import Damaged, NotFound
from weft.store import faults
from weft.store.atomic import TEMP_PREFIX, storage_errors, sync
from weft.store.remote_files import open_file_system

CHUNK_BYTES = 2**20
_NAME = re.compile(rf"[0-9a-f]{{2}}/({re.escape(TEMP_PREFIX)})?[0-9a-f]{{32}}(\.[a-z]{{1,12}})?")


class Blobs:
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
        token = secrets.token_hex(16)
        return BlobWriter(self, f"{token[:2]}/{token}{suffix}")

    def put(self, stream: IO[bytes] | Iterable[bytes] | bytes, suffix: str = "") -> str:
        with self.create(suffix) as writer:
            for chunk in _chunks(stream):
                writer.write(chunk)
            writer.commit()
            return writer.name

    def put_dir(self, directory: Path) -> str:
        """Stores the files directly inside a directory as one archive; equal files make equal archives."""
        return self.put_files(sorted(directory.iterdir()))

    def put_files(self, paths: Iterable[Path]) -> str:
        with self.create(".zip") as writer:
            pack(cast(IO[bytes], _BlobWriterStream(writer)), paths)
            writer.commit()
            return writer.name

    def open(self, name: str) -> IO[bytes]:
        """Opens a blob as a stream; raises NotFound if there is none."""
        path = self.path_of(name)
        with self.errors(name):
            if self._fs is None:
                return open(path, "rb")
            return io.BufferedReader(_RemoteBlobStream(self, name, self._fs.open(path, "rb")), CHUNK_BYTES)

    def size(self, name: str) -> int:
        path = self.path_of(name)
        with self.errors(name):
            return os.path.getsize(path) if self._fs is None else int(self._fs.size(path))

    def fetch(self, name: str, path: Path, sha256: str | None = None) -> None:
        """Copies a blob to a file; raises Damaged if its SHA-256 is another."""
        with self.open(name) as source, storage_errors(path), path.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
        if sha256 is not None:
            with path.open("rb") as copied:
                _compare(copied, sha256)

    def check(self, name: str, sha256: str) -> None:
        """Reads a blob; raises Damaged if its SHA-256 is another or it is gone."""
        try:
            with self.open(name) as stream:
                _compare(stream, sha256)
        except NotFound:
            raise Damaged("the stored bytes are gone.") from None

    def check_archive(self, name: str) -> None:
        """Reads an archive; raises Damaged if it is not as it was written or is gone."""
        path = self.path_of(name)
        try:
            with self.errors(name), open(path, "rb") if self._fs is None else self._fs.open(path, "rb") as stream:
                _extract(stream, {})
        except NotFound:
            raise Damaged("the stored archive is gone.") from None

    def delete(self, name: str) -> None:
        path = self.path_of(name)
        with contextlib.suppress(NotFound), self.errors(name):
            if self._fs is None:
                os.unlink(path)
            else:
                self._fs.rm_file(path)

    def names(self) -> Iterator[tuple[str, float]]:
        """Yields every blob, finished or not, with the time of its last write in unix seconds."""
        if self._fs is None:
            for path in sorted(Path(self._root).glob("??/*")):
                with contextlib.suppress(FileNotFoundError):
                    yield f"{path.parent.name}/{path.name}", path.stat().st_mtime
            return
        with self.errors("*"):
            found = list(self._fs.find(self._root))
        for path in found:
            name = "/".join(str(path).split("/")[-2:])
            with contextlib.suppress(NotFound), self.errors(name):
                yield name, self._fs.modified(path).timestamp()

    def is_within(self, directory: Path) -> bool:
        return self._fs is None and Path(self._root).is_relative_to(directory.resolve())

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._root).free if self._fs is None else None

    def path_of(self, name: str) -> str:
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
        self._final = Path(blobs.path_of(name))
        self._temp = self._final.with_name(TEMP_PREFIX + self._final.name)
        self._committed = False
        self._file = self._open()

    @property
    def sha256(self) -> str:
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
            return cast(IO[bytes], self._blobs._fs.open(self._blobs.path_of(self.name), "wb"))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """A directory that is not there is no missing blob to a writer."""
        with self._blobs.errors(self.name), storage_errors(self._final):
            yield

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self.num_bytes += len(data)
        with self._errors():
            faults.point("blob.write")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]

    def commit(self) -> None:
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
    """A stream from a URL that raises our own errors."""

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


COPIED_BYTES = 2**20


def pack(stream: IO[bytes], paths: Iterable[Path]) -> None:
    """Writes files into an archive, each under its own name; equal files make equal archives."""
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for path in paths:
            entry = zipfile.ZipInfo(path.name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target, COPIED_BYTES)


def unpack(archive: Path, folder: Path, names: Collection[str]) -> None:
    """Unpacks the files of these names from an archive, and nothing else in it; raises Damaged as `check_archive`."""
    with storage_errors(folder), archive.open("rb") as stream:
        _extract(stream, {name: folder / name for name in names})


def _extract(stream: IO[bytes], targets: Mapping[str, Path]) -> None:
    """Reads all files of an archive to their ends, which compares their checksums, and copies those in `targets`."""
    try:
        with zipfile.ZipFile(stream) as packed:
            for name in packed.namelist():
                with packed.open(name) as member, targets.get(name, Path(os.devnull)).open("wb") as target:
                    shutil.copyfileobj(member, target, COPIED_BYTES)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError, RuntimeError) as error:
        raise Damaged(f"the stored archive is damaged ({error}).") from None


def _compare(stream: IO[bytes], sha256: str) -> None:
    if hashlib.file_digest(cast(Any, stream), "sha256").hexdigest() != sha256:
        raise Damaged("the stored bytes are damaged: their SHA-256 is not the recorded one.")
