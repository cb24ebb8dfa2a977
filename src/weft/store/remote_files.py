"""Files at any URL that fsspec supports (s3://…, gs://…), each whole or missing.

Object stores show an object when it is complete. On other file systems a file is uploaded under a temporary name and
renamed. An error of any library is raised as a StorageError that names the URL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import (
    ConfigError,
    MissingExtraError,
    StorageError,
    WeftError,
    first_line,
    install_command,
    needs_extra,
)
from weft.store import faults, json_text
from weft.store.atomic import TEMP_PREFIX
from weft.store.owner import Owner

PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Package for each kind of URL that is not installed by an extra."""
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Stores where an object appears when it is complete, and folders need not be made."""


def open_file_system(url: str, where: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path in it; `where`: the option that the URL was given with."""
    with needs_extra("serve", "a file store behind a URL needs fsspec.", where):
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
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


class FileStat(NamedTuple):
    size: int
    changed_at: int
    """Unix seconds; 0 if not known."""
    stamp: str
    """Changes with the contents."""


class RemoteDirectory:
    def __init__(self, url: str, where: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = open_file_system(self.url, where)
        self._is_object_store = url.partition("://")[0] in OBJECT_STORES

    def names(self) -> list[str]:
        return list(self.files())

    def files(self) -> dict[str, FileStat]:
        """All files, in the order of their names."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            found = {self._relative(path): info for path, info in self._fs.find(self._root, detail=True).items()}
            shown = sorted(name for name in found if not name.rpartition("/")[2].startswith(TEMP_PREFIX))
            return {name: _stat(found[name]) for name in shown}
        return {}

    def top_names(self) -> list[str]:
        with self._errors(), contextlib.suppress(FileNotFoundError):
            return sorted(self._relative(path) for path in self._fs.ls(self._root, detail=False))
        return []

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Contents of a file, or bytes `start` to `end` of them; None if it does not exist."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            return bytes(self._fs.cat_file(self._path(name), start=start or None, end=end))
        return None

    def write(self, name: str, data: bytes) -> None:
        with self._changes(name) as path:
            self._fs.pipe_file(path, data)

    def create(self, name: str, data: bytes) -> bool:
        """Writes a new file; False if it exists, or another process creates it at the same time. Where a file system
        cannot refuse to overwrite, the contents read afterwards decide."""
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


_TIMES = ("LastModified", "last_modified", "mtime", "created")
_STAMPS = ("ETag", "etag", "md5Hash", "updated", *_TIMES)
"""What file systems call them."""


def _stat(info: Mapping[str, Any]) -> FileStat:
    times = [info[name] for name in _TIMES if info.get(name) is not None]
    at = (times[0].timestamp() if hasattr(times[0], "timestamp") else times[0]) if times else 0
    return FileStat(int(info["size"]), int(at), str([info.get(name) for name in _STAMPS]))


BEAT_S = 10.0
LEASE_S = 60.0
"""An owner without a heartbeat for so long is taken for dead."""
LOOK_S = 3.0
"""Seconds between two reads of the record of an owner that may be alive."""
_NAME = re.compile(r"\.owner-(\d{1,18})")


def is_lease(name: str) -> bool:
    """True if a file at a URL is not part of the run but the record of an owner."""
    return _NAME.fullmatch(name) is not None


class Lease:
    def __init__(self, remote: RemoteDirectory, owner: Owner, local: Path) -> None:
        self.owner = owner
        self._remote = remote
        self._local = local
        self._num_beats = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @classmethod
    def claim(
        cls,
        remote: RemoteDirectory,
        local: Path,
        *,
        notify: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> Lease:
        """Becomes the owner, once the last one is known to have ended; `local` is this process's own copy, locked.
        StorageError if the last owner is alive, or another process is quicker. `notify` is called with the reason of a
        wait."""
        terms = _terms(remote)
        if terms:
            _await_end(remote, max(terms), local, notify, sleep)
        lease = cls(remote, Owner.here(max(terms, default=0) + 1), local)
        if not remote.create(lease._name, lease._record()):
            raise _in_use(remote, lease.owner.term)
        if (newest := max(_terms(remote))) > lease.owner.term:
            remote.delete(lease._name)
            raise _in_use(remote, newest)
        for term in terms:
            remote.delete(f".owner-{term}")
        return lease

    def keep(self) -> None:
        """Sends heartbeats until the lease is released."""

        def beat() -> None:
            while not self._stop.wait(BEAT_S):
                # An unreachable store gets a later heartbeat; `check` detects a takeover.
                with contextlib.suppress(StorageError):
                    self.beat()

        threading.Thread(target=beat, name="weft-lease", daemon=True).start()

    def beat(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self.check()
            self._num_beats += 1
            self._remote.write(self._name, self._record())

    def check(self) -> None:
        """StorageError once another process owns the run, or if the store is unreachable."""
        newest = max(_terms(self._remote), default=0)
        result = self._remote.read(f".owner-{newest}") if newest else None
        successor = None if result is None else Owner.parse(result, newest)
        if successor is None or successor.token != self.owner.token:
            by = "" if successor is None else f" by {successor}"
            raise LeaseLostError(f"was taken over{by}; this process writes nothing more there.", where=self._remote.url)

    def release(self) -> None:
        """Releases the run; the next owner need not wait."""
        self._stop.set()
        with self._lock, contextlib.suppress(StorageError):
            self.check()
            self.owner = dataclasses.replace(self.owner, is_released=True)
            self._remote.write(self._name, self._record())

    def withdraw(self) -> None:
        """Releases the run and restores its former contents, except terms: they keep counting."""
        self.release()
        if self.owner.term == 1:
            with contextlib.suppress(StorageError):
                self._remote.delete(self._name)

    @property
    def _name(self) -> str:
        return f".owner-{self.owner.term}"

    def _record(self) -> bytes:
        record = {**dataclasses.asdict(self.owner), "local": str(self._local), "beats": self._num_beats}
        return json.dumps(record).encode()


class LeaseLostError(StorageError):
    """The run at a URL belongs to another process now."""


def newest_term(remote: RemoteDirectory) -> int:
    """Number of owners that the run at a URL has had."""
    return max(_terms(remote), default=0)


def _await_end(
    remote: RemoteDirectory, term: int, local: Path, notify: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    """Returns once the owner of a term is known to have ended; StorageError if it lives."""
    before = remote.read(f".owner-{term}")
    if before is None:
        return
    owner = Owner.parse(before, term)
    if owner.is_released or (owner.is_of_this_machine and _local(before) == str(local)):
        return
    notify(f"{owner} has not released the run; without a heartbeat for {LEASE_S:g} s, this process takes over")
    for _ in range(int(LEASE_S / LOOK_S)):
        sleep(LOOK_S)
        now = remote.read(f".owner-{term}")
        if now != before:
            if now is not None and Owner.parse(now, term).is_released:
                return
            raise _in_use(remote, term)


def _local(record: bytes) -> object:
    with contextlib.suppress(ValueError, AttributeError):
        return json_text.parse(record).get("local")
    return None


def _in_use(remote: RemoteDirectory, term: int) -> StorageError:
    result = remote.read(f".owner-{term}")
    owner = "another process" if result is None else str(Owner.parse(result, term))
    return StorageError(f"is in use by {owner}.", where=remote.url, hint="Wait for its end, or name another URL.")


def _terms(remote: RemoteDirectory) -> list[int]:
    return [int(match[1]) for name in remote.top_names() if (match := _NAME.fullmatch(name))]
