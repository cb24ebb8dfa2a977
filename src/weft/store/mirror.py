"""Keeps the files at a URL equal to a local directory, so that a reader always finds a run that can be resumed.

Files are uploaded after everything they refer to, and deleted after everything that replaces them is there:

    metrics, settings and all else, tensors and adapters, status.json, trials.jsonl, a checkpoint's state.json, run.json

Copies for an upload are made in the opposite order, so each file is at least as new as those that refer to it, though
the run goes on meanwhile. The files of a checkpoint or an adapter, which appear together, are copied together. So at
every moment the URL holds what a run killed locally would have left, with its last checkpoints or earlier ones.

A run at a URL (`RunUrl`) is trained in a local copy, and changes are uploaded in the background. Training never waits
for the store. While the store is unreachable the copy holds what is not uploaded, and at the end the last changes must
arrive. A run whose process was killed is resumed from its copy on the same machine, and from the URL on another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from weft.errors import StorageError
from weft.spec.job import JOB_NAME
from weft.store import json_text
from weft.store.atomic import add_guard, storage_errors, write_file
from weft.store.owner import lock_file
from weft.store.remote_files import Lease, LeaseLostError, RemoteDirectory, is_lease, newest_term
from weft.store.run_dir import refuse_mismatch

MIRROR_S = 10.0
"""Seconds from one search for changes to the next."""
DRAIN_PAUSES_S = (0.0, 2.0, 5.0, 10.0, 20.0)
"""Pauses before each attempt to upload the last changes."""
_LATE = {"status.json": 2, "trials.jsonl": 3, "run.json": 5}
_TENSORS, _STATE = 1, 4
_FIRST, _LAST = 0, 5


@dataclass(frozen=True)
class _Change:
    name: str
    stamp: Stamp
    path: Path


class Mirror:
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
        """Copies files of one directory, even if another one is renamed to its path meanwhile. Nothing of a checkpoint
        or an adapter that is being removed is copied: half of one would be of no use."""
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
    if is_of_checkpoint(name):
        return _STATE if name.endswith("/state.json") else _TENSORS
    return _LATE.get(PurePosixPath(name).name, _TENSORS if _is_of_unit(name) else _FIRST)


def _taken_at(name: str) -> int:
    """The same for making copies; a checkpoint is copied as a whole."""
    return _STATE if is_of_checkpoint(name) else _upload_position(name)


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


_CHECKPOINT = re.compile(r"(?:^|/)checkpoints/step-\d{8,}/[^/]+$")
_LOCK, _RECORD, _OUTBOX, _ARRIVING = ".lock", ".mirrored.json", ".outbox", ".arriving"


class Stamp(NamedTuple):
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
        return (self.path / self._mark).exists()

    def is_up_to_date(self, term: int) -> bool:
        """True if the run has had no other owner since that of `term`, its last."""
        return 0 < term == self._term

    def empty(self) -> None:
        self.files, self._term = {}, 0
        with storage_errors(self._folder):
            # First the record that makes it valid.
            (self._folder / _RECORD).unlink(missing_ok=True)
            for entry in self._folder.iterdir():
                if entry.name != _LOCK:
                    shutil.rmtree(entry)

    def fetch(self, remote: RemoteDirectory) -> None:
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
        try:
            known = json_text.parse((self._folder / _RECORD).read_bytes())
            files = {name: None if stamp is None else Stamp(*stamp) for name, stamp in known["files"].items()}
            if known["url"] == self._url:
                self.files, self._term = files, int(known["term"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return


def download(remote: RemoteDirectory, names: Iterable[str], folder: Path) -> dict[str, Stamp | None]:
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


@dataclass(frozen=True)
class RunUrl:
    url: str
    content: str = "run"
    """What the URL holds, as error messages call it: a run or a sweep."""
    mark: str = "run.json"
    """File whose presence at the URL shows that a run is stored there."""
    option: str = "--out"
    """The option, argument or setting with the URL, for errors."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @contextlib.contextmanager
    def open_for_training(self, cache: Path, *, resume: bool, notify: Callable[[str], None]) -> Iterator[Path]:
        """Yields the local directory of the run, and owns the URL until the block ends, with all changes uploaded.
        StorageError if another process owns it, if it does not hold what `resume` expects, or if the last changes could
        not be uploaded. `cache`: folder of local copies. `notify` is called with notes for the user."""
        remote = RemoteDirectory(self.url, self.option)
        copy = LocalCopy(cache, remote.url, self.mark)
        is_saved = False
        try:
            lease = self._acquire(remote, copy, resume, notify)
            mirror = Mirror(copy, remote, lease)
            unguard = add_guard(copy.path, mirror.check)
            lease.keep()
            mirror.start(notify)
            try:
                yield copy.path
            except KeyboardInterrupt:
                # A second request to stop: the copy keeps what is not uploaded.
                mirror.stop()
                raise
            except BaseException:
                with contextlib.suppress(StorageError):
                    mirror.drain((0.0,))
                    is_saved = True
                raise
            else:
                self._drain(mirror, copy)
                is_saved = True
            finally:
                unguard()
                lease.release() if copy.holds_run else lease.withdraw()
        finally:
            copy.close(remove=is_saved or not copy.holds_run)

    @contextlib.contextmanager
    def open_for_reading(self) -> Iterator[Path]:
        """Yields a local directory with all files but tensors, to be read; the owner of the run goes on."""
        remote = RemoteDirectory(self.url, self.option)
        with tempfile.TemporaryDirectory(prefix="weft-run-") as parent:
            folder = Path(parent) / (self.name or "run")
            names = whole_names(remote.names())[0]
            download(remote, [name for name in names if not name.endswith(".safetensors")], folder)
            try:
                yield folder
            except StorageError as error:
                raise error.at((error.where or "").replace(str(folder), self.url)) from None

    def upload(self, path: Path) -> str:
        remote = RemoteDirectory(self.url, self.option)
        remote.upload(path, path.name)
        return f"{remote.url}/{path.name}"

    def _acquire(self, remote: RemoteDirectory, copy: LocalCopy, resume: bool, notify: Callable[[str], None]) -> Lease:
        """Becomes the owner of the URL, with a local copy that is as new as the files there."""
        self._refuse(remote, copy, newest_term(remote), resume)
        lease = Lease.claim(remote, copy.path, notify=notify)
        try:
            # No other process can change it now; what was read before may have changed until then.
            self._refuse(remote, copy, lease.owner.term - 1, resume)
            if not resume:
                copy.empty()
            elif not copy.is_up_to_date(lease.owner.term - 1):
                copy.fetch(remote)
            copy.take_ownership(lease.owner.term)
        except BaseException:
            lease.withdraw()
            raise
        return lease

    def _refuse(self, remote: RemoteDirectory, copy: LocalCopy, term: int, resume: bool) -> None:
        """StorageError if there is no run to resume, or one where none is expected; `term`: that of its last owner."""
        holds_run = copy.holds_run if copy.is_up_to_date(term) else remote.read(self.mark) is not None
        refuse_mismatch(self.url, holds_run, resume, self.content)

    def _drain(self, mirror: Mirror, copy: LocalCopy) -> None:
        try:
            mirror.drain()
        except LeaseLostError:
            raise
        except StorageError as error:
            hint = f"All is in {copy.path}; --resume on this machine goes on with that, and uploads it."
            raise error.at(error.where, hint) from None
