"""SHA-256 of data files, cached while the files are unchanged: hashing a large file takes longer than all else.

A digest is stored with all file attributes, and only for a file that was last changed a while ago: a change within the
same tick of the file system's clock would not be visible. A record that is unreadable or invalid is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

RECORD = "digests.json"
REMEMBERED_BYTES = 2**20
"""Smaller files are hashed without the cache."""
STABLE_S = 2.0
"""Minimum age of a file's last change for its digest to be cached."""
MAX_REMEMBERED = 10_000


class FileDigests:
    """Digests of files, with a record in a folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._known: dict[str, list[str | int]] | None = None
        self._new: dict[str, list[str | int]] = {}

    def of(self, path: Path) -> str:
        before = os.stat(path)
        if before.st_size < REMEMBERED_BYTES:
            return file_digest(path)
        if self._known is None:
            self._known = _read(self._folder / RECORD)
        name, stamp = os.path.realpath(path), _stamp(before)
        known = self._known.get(name)
        if known is not None and known[:-1] == stamp:
            return str(known[-1])
        result = file_digest(path)
        is_stable = self._clock() - max(before.st_mtime, before.st_ctime) > STABLE_S
        if is_stable and _stamp(os.stat(path)) == stamp:
            self._known[name] = self._new[name] = [*stamp, result]
        return result

    def save(self) -> None:
        """Merges new digests into the record, with those that other processes added meanwhile."""
        if not self._new:
            return
        record = _read(self._folder / RECORD)
        for name in self._new:
            record.pop(name, None)
        kept = dict(list({**record, **self._new}.items())[-MAX_REMEMBERED:])
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps(kept)
            _replace(self._folder / RECORD, json.dumps({"files": text, "sha256": _digest(text)}))
        self._new.clear()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> dict[str, list[str | int]]:
    """Contents of a record; empty if it is missing or incomplete."""
    try:
        whole = json.loads(path.read_text())
        if whole["sha256"] != _digest(whole["files"]):
            return {}
        result: dict[str, list[str | int]] = json.loads(whole["files"])
        return result
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _stamp(status: os.stat_result) -> list[str | int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
