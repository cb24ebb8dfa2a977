"""SHA-256 of data files, remembered as long as nobody touches them: to hash a large file takes longer than all else.

A digest is remembered with everything that the file system says of its file, and only for a file that was last changed
a while ago: one that is changed again within the same tick of its clock would look untouched. A record that cannot be
read or was tampered with is made anew.
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
"""Smaller files are hashed in no time."""
SETTLED_S = 2.0
"""How long ago a file must have changed for its digest to be remembered."""
MAX_REMEMBERED = 10_000


class FileDigests:
    """Digests of files, with a record in a folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._known: dict[str, list[str | int]] | None = None
        self._new: dict[str, list[str | int]] = {}

    def of(self, path: Path) -> str:
        """The digest of a file's contents."""
        before = os.stat(path)
        if before.st_size < REMEMBERED_BYTES:
            return file_digest(path)
        if self._known is None:
            self._known = _read(self._folder / RECORD)
        name, stamp = os.path.realpath(path), _stamp(before)
        known = self._known.get(name)
        if known is not None and known[:-1] == stamp:
            return str(known[-1])
        found = file_digest(path)
        is_settled = self._clock() - max(before.st_mtime, before.st_ctime) > SETTLED_S
        if is_settled and _stamp(os.stat(path)) == stamp:
            self._known[name] = self._new[name] = [*stamp, found]
        return found

    def save(self) -> None:
        """Adds what is new to the record, beside what other processes added meanwhile."""
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
    """SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> dict[str, list[str | int]]:
    """What a record says; nothing if it is not there or not whole."""
    try:
        whole = json.loads(path.read_text())
        if whole["sha256"] != _digest(whole["files"]):
            return {}
        found: dict[str, list[str | int]] = json.loads(whole["files"])
        return found
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


def _stamp(found: os.stat_result) -> list[str | int]:
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
