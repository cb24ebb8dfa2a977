"""Keeps the files at a URL equal to a local directory, so that a reader always finds a run that can be resumed.

Files are uploaded after everything they refer to, and deleted after everything that replaces them is there:

    metrics, settings and all else, tensors and adapters, status.json, trials.jsonl, a checkpoint's state.json, run.json

Copies for an upload are made in the opposite order, so each file is at least as new as those that refer to it, though
the run goes on meanwhile. The files of a checkpoint or an adapter, which appear together, are copied together. So at
every moment the URL holds what a run killed locally would have left, with its last checkpoints or earlier ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

from weft.errors import StorageError
from weft.store.atomic import storage_errors
from weft.store.remote.file_system import RemoteDirectory
from weft.store.remote.lease import Lease, LeaseLostError
from weft.store.remote.local_copy import LocalCopy, Stamp, is_of_checkpoint

MIRROR_S = 10.0
"""Seconds from one search for changes to the next."""
DRAIN_PAUSES_S = (0.0, 2.0, 5.0, 10.0, 20.0)
"""Pauses before each attempt to upload the last changes."""
_LATE = {"status.json": 2, "trials.jsonl": 3, "run.json": 5}
_TENSORS, _CHECKPOINT = 1, 4
_FIRST, _LAST = 0, 5


@dataclass(frozen=True)
class _Change:
    """A file to be uploaded, as it was at one moment."""

    name: str
    stamp: Stamp
    path: Path


class Mirror:
    """A local directory, and its files at the URL."""

    def __init__(self, copy: LocalCopy, remote: RemoteDirectory, lease: Lease) -> None:
        self._copy, self._remote, self._lease = copy, remote, lease
        self._known: dict[str, Stamp | None] = dict(copy.files)
        """Files that may be at the URL because of this run, with the local file of each; None if that is not
        certain."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: LeaseLostError | None = None
        """The error that names the process that has taken the run over."""

    def start(self, warn: Callable[[str], None]) -> None:
        """Uploads changes from now on; `warn` is called when uploads fail, and when they work again."""
        self._thread = threading.Thread(target=self._serve, args=(warn,), name="weft-mirror", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the search for changes."""
        self._stop.set()

    def drain(self, pauses_s: tuple[float, ...] = DRAIN_PAUSES_S, sleep: Callable[[float], None] = time.sleep) -> None:
        """Uploads the last changes; StorageError if that fails after some attempts."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        for attempt, pause_s in enumerate(pauses_s, start=1):
            sleep(pause_s)
            try:
                self.sync()
                return
            except LeaseLostError:
                raise
            except StorageError:
                if attempt == len(pauses_s):
                    raise

    def check(self) -> None:
        """Raises an error if the run has another owner by now; does not access the URL."""
        if self.lost is not None:
            raise self.lost

    def sync(self) -> None:
        """Uploads changed files and deletes removed ones; after an error the next call goes on."""
        if not self._copy.holds_run:
            # A run that is never recorded leaves no files.
            return
        self._lease.check()
        with self._set_aside() as (changes, present):
            gone = self._known.keys() - present
            if not changes and not gone:
                return
            self._known.update(dict.fromkeys(change.name for change in changes))
            self._copy.note(self._known)
            for change in changes:
                self._remote.upload(change.path, change.name)
                self._known[change.name] = change.stamp
            if gone:
                self._lease.check()
            for name in sorted(gone, key=lambda name: (-_upload_position(name), name)):
                if not (self._copy.path / name).exists():
                    self._remote.delete(name)
                    del self._known[name]
            self._copy.note(self._known)

    def _serve(self, warn: Callable[[str], None]) -> None:
        is_away = False
        while not self._stop.wait(MIRROR_S):
            try:
                self.sync()
            except LeaseLostError as error:
                self.lost = error
                warn(str(error))
                return
            except StorageError as error:
                if not is_away:
                    warn(f"{error} Training goes on; what is written is uploaded later.")
                is_away = True
            else:
                if is_away:
                    warn(f"{self._remote.url}: answers again; all is uploaded.")
                is_away = False

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[tuple[list[_Change], set[str]]]:
        """Yields copies of all files that have changed, in the order of their uploads, and the names of all files."""
        changes: list[_Change] = []
        present: set[str] = set()
        folder = self._copy.outbox
        with storage_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        try:
            for position in range(_LAST, _FIRST - 1, -1):
                names = sorted(_names(self._copy.path))
                present.update(names)
                due = [name for name in names if _taken_at(name) == position]
                for parent, group in groupby(due, key=lambda name: name.rpartition("/")[0]):
                    changes += self._take(parent, [name.rpartition("/")[2] for name in group], len(changes))
            yield sorted(changes, key=lambda change: (_upload_position(change.name), change.name)), present
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self, parent: str, names: list[str], number: int) -> list[_Change]:
        """Copies files of one directory, even if another one is renamed to its path meanwhile.

        Nothing of a checkpoint or an adapter that is being removed is copied: half of one would be of no use.
        """
        taken: list[_Change] = []
        with storage_errors(self._copy.path), contextlib.ExitStack() as close:
            try:
                directory = os.open(self._copy.path / parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
            close.callback(os.close, directory)
            for name in names:
                full, target = f"{parent}/{name}" if parent else name, self._copy.outbox / str(number + len(taken))
                try:
                    stamp = Stamp.of(os.stat(name, dir_fd=directory))
                    if self._known.get(full) != stamp:
                        _copy_file(name, directory, target)
                        taken.append(_Change(full, stamp, target))
                except FileNotFoundError:
                    if _is_of_unit(full):
                        return []
        return taken


def _upload_position(name: str) -> int:
    """Position in the order of uploads: files come after everything they refer to."""
    if is_of_checkpoint(name):
        return _CHECKPOINT if name.endswith("/state.json") else _TENSORS
    return _LATE.get(PurePosixPath(name).name, _TENSORS if _is_of_unit(name) else _FIRST)


def _taken_at(name: str) -> int:
    """The same for making copies; a checkpoint is copied as a whole."""
    return _CHECKPOINT if is_of_checkpoint(name) else _upload_position(name)


def _is_of_unit(name: str) -> bool:
    """True if a file appears and is removed together with all others of its directory."""
    return is_of_checkpoint(name) or PurePosixPath(name).parent.name in ("adapter", "best")


def _names(root: Path) -> Iterator[str]:
    """All files of a run; hidden ones are for this machine only."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = folder[len(str(root)) + 1 :]
        for name in files:
            if not name.startswith("."):
                yield f"{inside}/{name}" if inside else name


def _copy_file(name: str, directory: int, target: Path) -> None:
    """Copies a file. Tensors never change once they are in place, so a link is enough; anything else may be appended
    to."""
    if name.endswith(".safetensors"):
        with contextlib.suppress(OSError):
            os.link(name, target, src_dir_fd=directory)
            return
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    with open(descriptor, "rb") as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
