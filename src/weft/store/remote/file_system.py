"""Files at any URL that fsspec supports (s3://…, gs://…), each whole or missing.

Object stores show an object when it is complete. On other file systems a file is uploaded under a temporary name and
renamed. An error of any library is raised as a StorageError that names the URL.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft import faults
from weft.errors import ConfigError, MissingExtraError, StorageError, WeftError, first_line, install_command
from weft.store.atomic import TEMP_PREFIX

PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Package for each kind of URL that is not installed by an extra."""
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Stores where an object appears when it is complete, and folders need not be made."""


def open_file_system(url: str, where: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path in it; `where`: the option that the URL was given with."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtraError(
            "a file store behind a URL needs fsspec.", where=where, hint=f"Install it: {install_command('serve')}."
        ) from None
    try:
        # Other processes write to the same store: what was listed once is not what is there.
        fs, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        kind = url.partition("://")[0]
        package = PACKAGES.get(kind, f"the fsspec file system of {kind}://")
        hint = f"Install it: {install_command('s3') if kind == 's3' else f'pip install {package}'}."
        raise MissingExtraError(
            f"{kind}:// needs a package that is not here ({error}).", where=where, hint=hint
        ) from None
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a file store ({error}).", where=where) from None
    except Exception as error:  # some connect at once, and have errors of their own
        raise StorageError(f"{url!r} does not answer ({type(error).__name__}: {error}).", where=where) from None
    return fs, str(root).rstrip("/")


class RemoteDirectory:
    """The files below a URL, by their names relative to it."""

    def __init__(self, url: str, where: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = open_file_system(self.url, where)
        self._is_object_store = url.partition("://")[0] in OBJECT_STORES

    def names(self) -> list[str]:
        """All files, sorted."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            result = sorted(self._relative(path) for path in self._fs.find(self._root))
            return [name for name in result if not name.rpartition("/")[2].startswith(TEMP_PREFIX)]
        return []

    def top_names(self) -> list[str]:
        """Files and folders directly below the URL."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            return sorted(self._relative(path) for path in self._fs.ls(self._root, detail=False))
        return []

    def read(self, name: str) -> bytes | None:
        """Contents of a file; None if it does not exist."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            return bytes(self._fs.cat_file(self._path(name)))
        return None

    def write(self, name: str, data: bytes) -> None:
        with self._changes(name) as path:
            self._fs.pipe_file(path, data)

    def create(self, name: str, data: bytes) -> bool:
        """Writes a new file; False if it exists, or another process creates it at the same time.

        Where a file system cannot refuse to overwrite, the contents read afterwards decide.
        """
        failure: StorageError | None = None
        try:
            with self._errors():
                self._make_folder(name)
                self._fs.pipe_file(self._path(name), data, mode="create")
        except StorageError as error:
            failure = error
        result = self.read(name)
        if result is None:
            raise failure or StorageError("does not keep what is written there.", where=self.url)
        return result == data

    def upload(self, path: Path, name: str) -> None:
        with self._changes(name) as target:
            self._fs.put_file(str(path), target)

    def download(self, name: str, path: Path) -> None:
        with self._errors():
            self._fs.get_file(self._path(name), str(path))

    def delete(self, name: str) -> None:
        faults.point("remote.delete")
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
        faults.point("remote.delete")

    @contextlib.contextmanager
    def _changes(self, name: str) -> Iterator[str]:
        """Yields the path to write a file to, which is then renamed."""
        final = self._path(name)
        folder, _, last = final.rpartition("/")
        temp = f"{folder}/{TEMP_PREFIX}{secrets.token_hex(8)}-{last}"
        with self._errors():
            faults.point("remote.write")
            self._make_folder(name)
            yield final if self._is_object_store else temp
            if not self._is_object_store:
                self._fs.mv(temp, final)
            faults.point("remote.write")

    def _make_folder(self, name: str) -> None:
        if not self._is_object_store:
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _relative(self, path: object) -> str:
        return str(path).removeprefix(self._root).strip("/")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except WeftError:
            raise
        except Exception as error:  # libraries of object stores have errors of their own
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {first_line(error)}"
            raise StorageError(f"does not answer ({reason}).", where=self.url) from error
