"""The file store: bytes under names of our own, on a directory or behind any fsspec URL (s3://…, gs://…).

In a directory a blob is written beside its place, synced and renamed. Object stores show an object only when it is
complete. Names are random, so nothing a user says becomes part of a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from weft import faults
from weft.errors import ConfigError, MissingExtraError, StorageError
from weft.serve.errors import NotFound
from weft.store.atomic import TEMP_PREFIX, storage_errors, sync

CHUNK_BYTES = 2**20
_NAME = re.compile(rf"[0-9a-f]{{2}}/({re.escape(TEMP_PREFIX)})?[0-9a-f]{{32}}(\.[a-z]{{1,12}})?")


class Blobs:
    """Blobs at a directory or URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs: Any = None
        if "://" in url and not url.startswith("file://"):
            self._fs, self._root = _remote(url)
        else:
            self._root = str(Path(url.removeprefix("file://")).resolve())
            with storage_errors(Path(self._root)):
                Path(self._root).mkdir(parents=True, exist_ok=True)

    def create(self, suffix: str = "") -> BlobWriter:
        """A blob to write to; it exists from `commit` on."""
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
        """Stores the files directly inside a directory as one zip archive; equal files make equal archives."""
        with self.create(suffix) as writer:
            with zipfile.ZipFile(_Sink(writer), "w", zipfile.ZIP_STORED) as archive:
                for path in sorted(directory.iterdir()):
                    entry = zipfile.ZipInfo(path.name, (1980, 1, 1, 0, 0, 0))
                    entry.external_attr = 0o644 << 16
                    with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                        shutil.copyfileobj(source, target, CHUNK_BYTES)
            writer.commit()
            return writer.name

    def open(self, name: str) -> IO[bytes]:
        """The blob as a stream; NotFound if there is none."""
        place = self.place(name)
        try:
            return open(place, "rb") if self._fs is None else self._fs.open(place, "rb")
        except FileNotFoundError:
            raise NotFound(f"the blob {name} is not in the file store.") from None
        except OSError as error:
            raise StorageError(f"cannot be read ({error.strerror or error}).", where=self.url) from error

    def size(self, name: str) -> int:
        """Bytes of a blob; NotFound if there is none."""
        try:
            return os.path.getsize(self.place(name)) if self._fs is None else int(self._fs.size(self.place(name)))
        except FileNotFoundError:
            raise NotFound(f"the blob {name} is not in the file store.") from None

    def fetch(self, name: str, path: Path) -> None:
        """Copies a blob to a new file."""
        with self.open(name) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def delete(self, name: str) -> None:
        """The blob is gone, or what was written of it; deleting what is not there is fine."""
        place = self.place(name)
        try:
            if self._fs is None:
                os.unlink(place)
            else:
                self._fs.rm_file(place)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"cannot be deleted ({error.strerror or error}).", where=self.url) from error

    def names(self) -> Iterator[tuple[str, float]]:
        """Every blob, finished or not, and when it was last written, in unix seconds."""
        if self._fs is None:
            for path in sorted(Path(self._root).glob("??/*")):
                with contextlib.suppress(FileNotFoundError):
                    yield f"{path.parent.name}/{path.name}", path.stat().st_mtime
            return
        for place in self._fs.find(self._root):
            yield "/".join(str(place).split("/")[-2:]), self._fs.modified(place).timestamp()

    def free_bytes(self) -> int | None:
        """Bytes left on the disk, or None where nobody knows."""
        return shutil.disk_usage(self._root).free if self._fs is None else None

    def place(self, name: str) -> str:
        """Where a blob is; only names made here have a place."""
        if not _NAME.fullmatch(name):
            raise NotFound(f"{name!r} is not the name of a blob.")
        return f"{self._root}/{name}"


class BlobWriter:
    """A blob being written: counted, hashed, and gone again unless committed."""

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
        return cast(IO[bytes], self._blobs._fs.open(self._blobs.place(self.name), "wb"))

    def write(self, data: bytes) -> None:
        """Appends bytes."""
        self._hash.update(data)
        self.num_bytes += len(data)
        with storage_errors(self._final):
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
            self._file.close()
        self._committed = True

    def __exit__(self, *_: object) -> None:
        if self._committed:
            return
        if self._blobs._fs is None:
            self._file.close()
            # An error may come after the rename, and then nobody will ever name the blob.
            for path in (self._temp, self._final):
                path.unlink(missing_ok=True)
        else:
            discard = getattr(self._file, "discard", self._file.close)
            discard()
            # Some file systems show an object from its first byte on.
            self._blobs.delete(self.name)


class _Sink(io.RawIOBase):
    """What zipfile needs of a file that cannot seek."""

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


def _remote(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtraError(
            "a file store behind a URL needs fsspec.",
            where="--store",
            hint="Install it: pip install 'weft-lora[serve]'.",
        ) from None
    try:
        fs, root = url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{error}.", where="--store") from None
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a file store ({error}).", where="--store") from None
    return fs, str(root).rstrip("/")
