"""The copy of a run behind a URL on this machine: where it is trained, and what it knows of the files behind the URL.

<cache>/<digest of the URL>/
  .lock              held while a process works here
  .mirrored.json     which of the run's owners this copy is of, and which of its files lie behind the URL
  .outbox/           files on their way there
  <name>/            the run directory

A copy is up to date if nobody else has owned the run since: then it is at least as new as what lies behind the URL.
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
    """Tells one content of a local file from another."""

    inode: int
    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        """That of a file."""
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class LocalCopy:
    """The copy of one URL, locked against other processes of this machine until it is closed."""

    def __init__(self, cache: Path, url: str, mark: str) -> None:
        """`mark`: the file whose presence means that there is a run."""
        self._folder = cache / hashlib.sha256(url.encode()).hexdigest()[:16]
        last = url.rpartition("/")[2]
        self.path = self._folder / (last if JOB_NAME.fullmatch(last) else "run")
        self.outbox = self._folder / _OUTBOX
        self.files: Mapping[str, Stamp | None] = {}
        """What may lie behind the URL, and of which local file it is; None if that is not certain."""
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
        """Whether a run was begun here."""
        return (self.path / self._mark).exists()

    def is_up_to_date(self, term: int) -> bool:
        """Whether nobody else has owned the run since, if its last owner was that of `term`."""
        return 0 < term == self._term

    def empty(self) -> None:
        """Removes what is here."""
        self.files, self._term = {}, 0
        with storage_errors(self._folder):
            # First what says that it is of any worth.
            (self._folder / _RECORD).unlink(missing_ok=True)
            for entry in self._folder.iterdir():
                if entry.name != _LOCK:
                    shutil.rmtree(entry)

    def fetch(self, remote: RemoteDirectory) -> None:
        """Replaces what is here by what lies behind the URL."""
        self.empty()
        arriving = self._folder / _ARRIVING
        whole, torn = whole_names(remote.names())
        stamps = download(remote, whole, arriving)
        with storage_errors(self._folder):
            arriving.rename(self.path)
        self.files = {**stamps, **dict.fromkeys(torn)}

    def own(self, term: int) -> None:
        """What is here belongs to the owner of this term from now on."""
        self._term = term
        self.note(self.files)

    def note(self, files: Mapping[str, Stamp | None]) -> None:
        """Records what may lie behind the URL."""
        self.files = dict(files)
        write_file(
            self._folder / _RECORD,
            json.dumps({"url": self._url, "term": self._term, "files": self.files}),
        )

    def close(self, *, remove: bool) -> None:
        """Lets other processes of this machine have it; `remove`: nothing here is needed any more."""
        if remove:
            self.empty()
        os.close(self._lock)

    def _read(self) -> None:
        """What an earlier process recorded; a record that cannot be read is of no worth."""
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
    """Whether a file belongs to a checkpoint of a job, whatever that is called."""
    return _CHECKPOINT.search(name) is not None


def whole_names(names: list[str]) -> tuple[list[str], list[str]]:
    """Files of the run, and leftovers: what an upload or a deletion that was cut short left of a checkpoint."""
    own = [name for name in names if _is_of_run(name)]
    states = {str(PurePosixPath(name).parent) for name in own if PurePosixPath(name).name == "state.json"}
    torn = [name for name in own if is_of_checkpoint(name) and str(PurePosixPath(name).parent) not in states]
    return [name for name in own if name not in torn], torn


def _is_of_run(name: str) -> bool:
    """Not a lease, and no name that leads elsewhere or that no run has."""
    return bool(name) and not is_lease(name) and not any(part.startswith(".") or not part for part in name.split("/"))
