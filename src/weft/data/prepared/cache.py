"""The cache of prepared data: each distinct data is prepared once, whoever asks for it and however often.

In a process the entries used last are at hand; across processes they are folders on disk, named by their keys, whose
arrays are mapped. A folder is filled under a temporary name and renamed when it is whole, so that nobody sees half of
one and of two processes that prepare the same data one wins. What a killed process left is removed by the next that
prepares something. A disk that is full or cannot be written costs the cache, not the run.
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
from weft.data.prepared.digests import RECORD, FileDigests
from weft.data.prepared.entry import USED, read_entry, read_page, write_entry
from weft.errors import ConfigError

PLACE_VARIABLE, LIMIT_VARIABLE = "WEFT_CACHE", "WEFT_CACHE_GB"
OFF = "off"
DEFAULT_GB = 20.0
MAX_HELD = 16
"""Entries at hand in a process; mapped ones take no memory."""
TEMP_PREFIX, LOCK = "tmp-", "lock"
UNLOCKED_AGE_S = 3600.0
"""How old an unfinished folder without a lock must be to count as left behind."""
Make = Callable[[Path | None], Dataset]
"""Prepares data in a folder, or without one in memory."""


@dataclass(frozen=True)
class EntryInfo:
    """What is known of an entry without opening its arrays."""

    key: str
    num_bytes: int
    used: float
    """When it was used last, in seconds since 1970."""
    sources: tuple[str, ...]
    """Names of its files when it was made."""
    num_samples: int


class PreparedCache:
    """Entries below one folder, which together take no more than `limit_bytes`."""

    def __init__(self, root: Path, limit_bytes: float) -> None:
        self.root, self.limit_bytes = root, limit_bytes
        self.digests = FileDigests(root)
        self._held: OrderedDict[str, Dataset] = OrderedDict()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()
        self._has_told = False

    def get(self, key: str, make: Make, is_current: Callable[[], bool]) -> Dataset:
        """The data of a key: at hand, on disk, or made now; kept only if `is_current` afterwards."""
        with self._guard:
            lock = self._locks[key]
        with lock:
            with self._guard:
                found = self._held.get(key)
            if found is None:
                found = self._open(key) or self._make(key, make, is_current)
            if is_current():
                self._hold(key, found)
        return found

    def _hold(self, key: str, data: Dataset) -> None:
        with self._guard:
            self._held[key] = data
            self._held.move_to_end(key)
            while len(self._held) > MAX_HELD:
                self._held.popitem(last=False)

    def entries(self) -> list[EntryInfo]:
        """All entries, the one used last first."""
        found = [_info(folder) for folder in self._folders() if not folder.name.startswith(TEMP_PREFIX)]
        return sorted(found, key=lambda entry: -entry.used)

    def forget(self, is_gone: Callable[[EntryInfo], bool]) -> int:
        """Removes the entries of which that is so, also those at hand; returns how many there were."""
        gone = [entry for entry in self.entries() if is_gone(entry)]
        for entry in gone:
            with self._guard:
                self._held.pop(entry.key, None)
            self._remove(self.root / entry.key)
        return len(gone)

    def clear(self) -> int:
        """Removes all entries and what was left behind; returns how many entries there were."""
        num_entries = self.forget(lambda _: True)
        self._remove_leftovers()
        (self.root / RECORD).unlink(missing_ok=True)
        return num_entries

    def _open(self, key: str) -> Dataset | None:
        folder = self.root / key
        found = read_entry(folder)
        with contextlib.suppress(OSError):
            if found is not None:
                os.utime(folder / USED)
            elif folder.exists():
                self._remove(folder)
        return found

    def _make(self, key: str, make: Make, is_current: Callable[[], bool]) -> Dataset:
        made, reason = None, "its files changed while they were read"
        try:
            with self._temporary() as folder:
                made = make(folder)
                if is_current():
                    write_entry(folder, made)
                    # A process that was quicker is left its place.
                    with contextlib.suppress(FileExistsError):
                        _rename_new(folder, self.root / key)
                    self._shrink(key)
                    reason = f"another program changes {self.root}"
        except OSError as error:
            reason = f"{self.root} cannot be written ({error.strerror or error})"
        # What was made is mapped: it stays, whatever became of its folder.
        return read_entry(self.root / key) or self._noted(make(None) if made is None else made, reason)

    def _noted(self, data: Dataset, reason: str) -> Dataset:
        """The data with a note that it is not kept, the first time that happens."""
        if self._has_told:
            return data
        self._has_told = True
        note = f"prepared data is not kept for the next run: {reason}"
        return replace(data, summary=replace(data.summary, notes=(*data.summary.notes, note)))

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A folder to fill, which is gone afterwards unless it was renamed; a lock says that somebody is at it."""
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
        """Removes what was used least recently until the rest fits; whoever has it mapped keeps it."""
        left = self.limit_bytes
        for entry in sorted(self.entries(), key=lambda entry: (entry.key != newest, -entry.used)):
            left -= entry.num_bytes
            if left < 0 and entry.key != newest:
                self._remove(self.root / entry.key)

    def _remove_leftovers(self) -> None:
        for folder in self._folders():
            if folder.name.startswith(TEMP_PREFIX) and _is_left_behind(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _remove(self, folder: Path) -> None:
        """Takes an entry away at once, by its name, before its files go one by one."""
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
    """The cache of this user, as the environment says: where it is and how large it gets; None where it is off."""
    place = os.environ.get(PLACE_VARIABLE)
    if place == OFF:
        return None
    text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_GB)
    try:
        limit_gb = float(text)
        if not 0 < limit_gb < float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(f"is {text!r}; expected a number of gigabytes above 0.", where=LIMIT_VARIABLE) from None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _cache_at(Path(place or Path(home) / "weft" / "data").expanduser(), limit_gb * 1e9)


@functools.cache
def _cache_at(root: Path, limit_bytes: float) -> PreparedCache:
    return PreparedCache(root, limit_bytes)


def _rename_new(folder: Path, target: Path) -> None:
    """Renames a folder to a place that is free; FileExistsError if it is taken."""
    try:
        folder.rename(target)
    except OSError:
        if target.is_dir():
            raise FileExistsError(str(target)) from None
        raise


def _is_left_behind(folder: Path) -> bool:
    """Whether whoever filled a folder is gone: nobody holds its lock."""
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
    num_bytes = sum(said["bytes"] for said in page["files"].values())
    summary = page["summary"]
    return EntryInfo(folder.name, num_bytes, used, tuple(summary["sources"]), summary["num_samples"])
