"""The copy on this machine of a run at a URL: the run is trained here, with a record of the files at the URL.

<cache>/<digest of the URL>/
  .lock              held while a process works here
  .mirrored.json     the owner of the run that this copy is of, and which of its files are at the URL
  .outbox/           files being uploaded
  <name>/            the run directory

A copy is up to date if the run has had no other owner since: then it is at least as new as the files at the URL.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from weft.errors import StorageError
from weft.spec.job import JOB_NAME
from weft.store import json_text
from weft.store.atomic import storage_errors, write_file
from weft.store.remote.file_system import RemoteDirectory
from weft.store.remote.lease import is_lease
from weft.store.run_lock import lock_file

_CHECKPOINT = re.compile(r"(?:^|/)checkpoints/step-\d{8,}/[^/]+$")
_LOCK, _RECORD, _OUTBOX, _ARRIVING = ".lock", ".mirrored.json", ".outbox", ".arriving"


class Stamp(NamedTuple):
    """Identifies the content of a local file."""

    inode: int
    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class LocalCopy:
    """The copy of one URL, locked against other processes of this machine until it is closed."""

    def __init__(self, cache: Path, url: str, mark: str) -> None:
        """`mark`: the file whose presence means that there is a run."""
        self._folder = cache / hashlib.sha256(url.encode()).hexdigest()[:16]
        last = url.rpartition("/")[2]
        self.path = self._folder / (last if JOB_NAME.fullmatch(last) else "run")
        self.outbox = self._folder / _OUTBOX
        self.files: Mapping[str, Stamp | None] = {}
        """Files that may be at the URL, with the local file that each is of; None if that is not certain."""
        self._url, self._mark = url, mark
        self._term = 0
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                lock_file(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                problem = "is in use by another process of this machine"
                raise StorageError(f"{problem}.", where=url, hint="Wait for its end, or name another URL.") from None
        self._read()

    @property
    def holds_run(self) -> bool:
        """True if a run was begun here."""
        return (self.path / self._mark).exists()

    def is_up_to_date(self, term: int) -> bool:
        """True if the run has had no other owner since that of `term`, its last."""
        return 0 < term == self._term

    def empty(self) -> None:
        """Removes all files."""
        self.files, self._term = {}, 0
        with storage_errors(self._folder):
            # First the record that makes it valid.
            (self._folder / _RECORD).unlink(missing_ok=True)
            for entry in self._folder.iterdir():
                if entry.name != _LOCK:
                    shutil.rmtree(entry)

    def fetch(self, remote: RemoteDirectory) -> None:
        """Replaces all files by those at the URL."""
        self.empty()
        arriving = self._folder / _ARRIVING
        whole, torn = whole_names(remote.names())
        stamps = download(remote, whole, arriving)
        with storage_errors(self._folder):
            arriving.rename(self.path)
        self.files = {**stamps, **dict.fromkeys(torn)}

    def take_ownership(self, term: int) -> None:
        """Records that the files here belong to the owner of this term from now on."""
        self._term = term
        self.note(self.files)

    def note(self, files: Mapping[str, Stamp | None]) -> None:
        """Records which files may be at the URL."""
        self.files = dict(files)
        write_file(
            self._folder / _RECORD,
            json.dumps({"url": self._url, "term": self._term, "files": self.files}),
        )

    def close(self, *, remove: bool) -> None:
        """Releases the copy for other processes of this machine; with `remove` it is deleted."""
        if remove:
            self.empty()
        os.close(self._lock)

    def _read(self) -> None:
        """The record of an earlier process; one that cannot be read is ignored."""
        try:
            known = json_text.parse((self._folder / _RECORD).read_bytes())
            files = {name: None if stamp is None else Stamp(*stamp) for name, stamp in known["files"].items()}
            if known["url"] == self._url:
                self.files, self._term = files, int(known["term"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return


def download(remote: RemoteDirectory, names: Iterable[str], folder: Path) -> dict[str, Stamp | None]:
    """Copies files into a new folder."""
    stamps: dict[str, Stamp | None] = {}
    with storage_errors(folder):
        folder.mkdir()
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            remote.download(name, path)
            stamps[name] = Stamp.of(path.stat())
    return stamps


def is_of_checkpoint(name: str) -> bool:
    """True if a file belongs to a checkpoint of a job of any name."""
    return _CHECKPOINT.search(name) is not None


def whole_names(names: list[str]) -> tuple[list[str], list[str]]:
    """Files of the run, and leftovers of checkpoints whose upload or deletion was interrupted."""
    own = [name for name in names if _is_of_run(name)]
    states = {str(PurePosixPath(name).parent) for name in own if PurePosixPath(name).name == "state.json"}
    torn = [name for name in own if is_of_checkpoint(name) and str(PurePosixPath(name).parent) not in states]
    return [name for name in own if name not in torn], torn


def _is_of_run(name: str) -> bool:
    """True for files of a run: no lease, and no name outside it."""
    return bool(name) and not is_lease(name) and not any(part.startswith(".") or not part for part in name.split("/"))
