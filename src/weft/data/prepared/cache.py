"""The cache of prepared data: equal data is prepared once, for all jobs and processes.

In a process the entries used last are in memory; across processes they are folders on disk, named by their keys, whose
arrays are mapped. A folder is filled under a temporary name and renamed when it is whole, so an incomplete one is never
visible, and if two processes prepare the same data one wins. Remains of a killed process are removed by the next one
that prepares something. A full or read-only disk costs the cache, not the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from weft.data.dataset import Dataset
from weft.data.prepared.arrays import USED, read_entry, read_page, write_entry
from weft.data.prepared.key import RECORD, FileDigests
from weft.errors import ConfigError

CACHE_VARIABLE, LIMIT_VARIABLE = "WEFT_CACHE", "WEFT_CACHE_GB"
OFF = "off"
DEFAULT_GB = 20.0
MAX_HELD = 16
"""Entries in memory of a process; mapped ones take none."""
TEMP_PREFIX, LOCK = "tmp-", "lock"
UNLOCKED_AGE_S = 3600.0
"""Minimum age of an unfinished folder without a lock to count as abandoned."""
Make = Callable[[Path | None], Dataset]
"""Prepares data in a folder, or without one in memory."""


@dataclass(frozen=True)
class EntryInfo:
    key: str
    num_bytes: int
    used: float
    sources: tuple[str, ...]
    num_samples: int


class PreparedCache:
    """Entries in one folder, which together take at most `limit_bytes`."""

    def __init__(self, root: Path, limit_bytes: float) -> None:
        self.root, self.limit_bytes = root, limit_bytes
        self.digests = FileDigests(root)
        self._held: OrderedDict[str, Dataset] = OrderedDict()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()
        self._has_noted = False

    def get(self, key: str, make: Make, is_current: Callable[[], bool]) -> Dataset:
        """The data of a key: from memory, from disk, or prepared now; kept only if `is_current` afterwards."""
        with self._guard:
            lock = self._locks[key]
        with lock:
            with self._guard:
                data = self._held.get(key)
            if data is None:
                data = self._open(key) or self._make(key, make, is_current)
            if is_current():
                self._hold(key, data)
        return data

    def _hold(self, key: str, data: Dataset) -> None:
        with self._guard:
            self._held[key] = data
            self._held.move_to_end(key)
            while len(self._held) > MAX_HELD:
                self._held.popitem(last=False)

    def entries(self) -> list[EntryInfo]:
        entries = [_info(folder) for folder in self._folders() if not folder.name.startswith(TEMP_PREFIX)]
        return sorted(entries, key=lambda entry: -entry.used)

    def forget(self, is_gone: Callable[[EntryInfo], bool]) -> int:
        """Removes the entries for which `is_gone` is true, also from memory; returns their number."""
        gone = [entry for entry in self.entries() if is_gone(entry)]
        for entry in gone:
            with self._guard:
                self._held.pop(entry.key, None)
            self._remove(self.root / entry.key)
        return len(gone)

    def clear(self) -> int:
        num_entries = self.forget(lambda _: True)
        self._remove_leftovers()
        (self.root / RECORD).unlink(missing_ok=True)
        return num_entries

    def _open(self, key: str) -> Dataset | None:
        folder = self.root / key
        data = read_entry(folder)
        with contextlib.suppress(OSError):
            if data is not None:
                os.utime(folder / USED)
            elif folder.exists():
                self._remove(folder)
        return data

    def _make(self, key: str, make: Make, is_current: Callable[[], bool]) -> Dataset:
        made, reason = None, "its files changed while they were read"
        try:
            with self._temporary() as folder:
                made = make(folder)
                if is_current():
                    write_entry(folder, made)
                    try:
                        folder.rename(self.root / key)
                    except OSError:
                        # A process that was quicker is left its folder.
                        if not (self.root / key).is_dir():
                            raise
                    self._shrink(key)
                    reason = f"another program changes {self.root}"
        except OSError as error:
            reason = f"{self.root} cannot be written ({error.strerror or error})"
        # What was made is mapped: it stays, whatever became of its folder.
        return read_entry(self.root / key) or self._with_note(make(None) if made is None else made, reason)

    def _with_note(self, data: Dataset, reason: str) -> Dataset:
        """The data with a note that it is not cached, the first time that happens."""
        if self._has_noted:
            return data
        self._has_noted = True
        note = f"prepared data is not kept for the next run: {reason}"
        return replace(data, summary=replace(data.summary, notes=(*data.summary.notes, note)))

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A folder to fill, which is removed afterwards unless it was renamed; a lock marks it as in use."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_leftovers()
        folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=self.root))
        try:
            with (folder / LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _shrink(self, newest: str) -> None:
        """Removes the least recently used entries until the rest fits; processes that have one mapped keep it."""
        left = self.limit_bytes
        for entry in sorted(self.entries(), key=lambda entry: (entry.key != newest, -entry.used)):
            left -= entry.num_bytes
            if left < 0 and entry.key != newest:
                self._remove(self.root / entry.key)

    def _remove_leftovers(self) -> None:
        for folder in self._folders():
            if folder.name.startswith(TEMP_PREFIX) and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _remove(self, folder: Path) -> None:
        """Renames an entry at once, before its files are removed one by one."""
        aside = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=self.root))
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)

    def _folders(self) -> list[Path]:
        try:
            return [path for path in self.root.iterdir() if path.is_dir()]
        except OSError:
            return []


def default_cache() -> PreparedCache | None:
    """The cache of this user, with folder and size from the environment; None if it is off."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder == OFF:
        return None
    text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_GB)
    try:
        limit_gb = float(text)
        if not 0 < limit_gb < float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(f"is {text!r}; expected a number of gigabytes above 0.", where=LIMIT_VARIABLE) from None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _cache_at(Path(folder or Path(home) / "weft" / "data").expanduser(), limit_gb * 1e9)


@functools.cache
def _cache_at(root: Path, limit_bytes: float) -> PreparedCache:
    return PreparedCache(root, limit_bytes)


def _is_abandoned(folder: Path) -> bool:
    """True if the process that filled a folder is gone: its lock is free."""
    try:
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime > UNLOCKED_AGE_S
        return False
    except OSError:
        return False


def _info(folder: Path) -> EntryInfo:
    page = read_page(folder) or {"files": {}, "summary": {"sources": ("broken",), "num_samples": 0}}
    try:
        used = (folder / USED).stat().st_mtime
    except OSError:
        used = 0.0
    num_bytes = sum(file["bytes"] for file in page["files"].values())
    summary = page["summary"]
    return EntryInfo(folder.name, num_bytes, used, tuple(summary["sources"]), summary["num_samples"])
