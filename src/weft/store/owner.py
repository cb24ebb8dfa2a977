"""The owner of a run directory, recorded so that other machines can read it.

A lock on a network file system may hold on one machine only. So an owner also creates `.owner-<term>`, a small record
of itself, where terms count owners: of two that try to be the next, one creates the file. While it works it touches the
file, and the file system's own clock gives others its age. A successor removes the record of its predecessor, so a
process whose record is gone knows that the run has another owner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from weft.errors import StorageError
from weft.store import json_text
from weft.store.atomic import add_guard, forget, storage_errors

BEAT_S = 5.0
"""Seconds between two heartbeats of an owner."""
GONE_S = 30.0
"""An owner on another machine without a heartbeat for so long is taken for dead."""
_NAME = re.compile(r"\.owner-(\d{1,18})")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Owner:
    term: int
    """Number of the owner of the run, from 1."""
    host: str
    pid: int
    boot: str
    """Id of its machine's boot: processes with the same id see each other's locks."""
    token: str
    """Random, so that no other run has the same."""
    is_released: bool = False

    @classmethod
    def here(cls, term: int) -> Owner:
        return cls(term=term, host=platform.node(), pid=os.getpid(), boot=boot_id(), token=secrets.token_hex(16))

    @classmethod
    def parse(cls, data: bytes, term: int) -> Owner:
        """The owner of a term as it was recorded; fields that are missing, because it is being written, are unknown."""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            known: dict[str, Any] = json_text.parse(data)
            names = {field.name for field in dataclasses.fields(cls)} & known.keys()
            return cls(**{**{name: known[name] for name in names}, "term": term})
        return cls(term=term, host="another machine", pid=0, boot="", token="")

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @property
    def is_of_this_machine(self) -> bool:
        """True if it is, or was, a process of this machine since its boot."""
        return self.boot == boot_id()

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        return f"process {self.pid}" if self.is_of_this_machine else f"process {self.pid} on {self.host}"


def boot_id() -> str:
    """Id that all processes of this machine share until it is booted again."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return platform.node()


class Ownership:
    """The right of a process to work in a directory, as its owner or as one of its ranks."""

    def __init__(self, root: Path, owner: Owner) -> None:
        self.owner = owner
        self._root = root
        self._path = root / f".owner-{owner.term}"
        self._stop = threading.Event()
        self._remove_guard = add_guard(root, self.check)

    @classmethod
    def claim(cls, root: Path) -> Ownership:
        """Becomes the next owner of a directory, with heartbeats until that ends. StorageError if another process is
        quicker. Once the record of the owner before is removed, it cannot rename unfinished files into place any
        more."""
        terms = _terms(root)
        owner = Owner.here(max(terms, default=0) + 1)
        path = root / f".owner-{owner.term}"
        with storage_errors(root), contextlib.ExitStack() as undo:
            try:
                file = undo.enter_context(open(path, "xb", buffering=0))
            except FileExistsError:
                raise in_use(root) from None
            undo.callback(path.unlink)
            file.write(owner.encode())
            if max(_terms(root)) > owner.term:
                # The owners seen above have had successors since, which made this term free again.
                raise in_use(root)
            undo.pop_all()
            file.close()
        for term in terms:
            (root / f".owner-{term}").unlink(missing_ok=True)
        own = cls(root, owner)
        threading.Thread(target=own._send_heartbeats, name="weft-owner", daemon=True).start()
        return own

    @classmethod
    def join(cls, root: Path, owner: Owner, who: str) -> Ownership:
        """Works under the owner of a directory; StorageError if that is not the directory seen here."""
        path = root / f".owner-{owner.term}"
        result = None
        with contextlib.suppress(OSError):
            result = Owner.parse(path.read_bytes(), owner.term)
        if result is None or result.token != owner.token:
            seen = f"{who} on {platform.node()} does not find the run of process {owner.pid} on {owner.host} there"
            raise StorageError(f"{seen}; the run directory must be one that all machines share.", where=str(root))
        return cls(root, owner)

    def check(self) -> None:
        """StorageError once another process owns the directory."""
        with contextlib.suppress(FileNotFoundError):
            # Opened, because only then does a network file system query its server.
            if self.owner.token.encode() in self._path.read_bytes():
                return
        successor = newest_owner(self._root)
        by = "" if successor is None else f" by {successor}"
        raise StorageError(f"was taken over{by}; this process writes nothing more there.", where=str(self._root))

    def release(self) -> None:
        """Releases the directory as its owner; the next owner need not wait."""
        self.leave()
        with contextlib.suppress(OSError), open(self._path, "r+b", buffering=0) as file:
            file.write(dataclasses.replace(self.owner, is_released=True).encode())
            file.truncate()

    def withdraw(self) -> None:
        """Releases the directory and restores its former contents, except terms: they keep counting."""
        self.release()
        if self.owner.term == 1:
            self._path.unlink(missing_ok=True)

    def leave(self) -> None:
        self._stop.set()
        self._remove_guard()

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(BEAT_S):
            # A failed heartbeat does no harm: the next may succeed, and `check` detects a takeover.
            with contextlib.suppress(OSError):
                os.utime(self._path)


def refuse_owned(root: Path, lock: Path, *, is_locked: bool) -> None:
    """StorageError if a process that may be alive owns the directory; `is_locked`: this process has its lock. That lock
    proves that no other process of this machine works there."""
    owner = newest_owner(root)
    if owner is None or owner.is_released or (is_locked and owner.is_of_this_machine):
        return
    age_s = _age_s(root / f".owner-{owner.term}", lock)
    if age_s is not None and age_s < GONE_S:
        raise in_use(root, age_s)


def newest_owner(root: Path) -> Owner | None:
    term = max(_terms(root), default=0)
    with storage_errors(root), contextlib.suppress(FileNotFoundError):
        return Owner.parse((root / f".owner-{term}").read_bytes(), term)
    return None


def in_use(root: Path, age_s: float | None = None) -> StorageError:
    """The error for a second process; `age_s`: the age of the owner's last heartbeat."""
    owner, last_seen = newest_owner(root), ""
    hint = "Wait for its end, or name another directory."
    if age_s is not None:
        last_seen = f", last seen {max(0.0, age_s):.0f} s ago"
        hint = f"Wait for its end, or until it has been silent for {GONE_S:g} s, or name another directory."
    return StorageError(f"is in use by {owner or 'another process'}{last_seen}.", where=str(root), hint=hint)


def _terms(root: Path) -> list[int]:
    with storage_errors(root):
        return [int(match[1]) for name in os.listdir(root) if (match := _NAME.fullmatch(name))]


def _age_s(record: Path, lock: Path) -> float | None:
    """Seconds since a record was touched, both times by the clock of the file system; None if it is gone."""
    now_s = time.time()
    with contextlib.suppress(PermissionError):
        os.utime(lock)
        now_s = lock.stat().st_mtime
    try:
        descriptor = os.open(record, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return now_s - os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


LOCK = ".lock"
"""Held while a process works in the directory."""
RANKS_LOCK = ".ranks"
"""Every rank of a run holds a share of it while it works in the directory; it does not exist without ranks."""
_OWNER_LOCK = "owner.lock"
"""Held by the owner of a scratch folder."""
RANKS_GONE_S = 5.0
"""Seconds that ranks have to detect that their controller is gone."""


def take_lock(root: Path, undo: contextlib.ExitStack) -> int:
    """Locks the directory against other processes; the lock ends with this process, however it ends. For processes of
    machines that do not see the lock there is the record of the owner."""
    path = root / LOCK
    is_new = not path.exists()
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    undo.callback(os.close, lock)
    try:
        is_locked = lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise in_use(root) from None
    if not path.exists() or not os.path.samestat(os.fstat(lock), os.stat(path)):
        # It was removed between our open and our lock: no other process would see this lock.
        raise StorageError("is in use by another process.", where=str(root))
    refuse_owned(root, path, is_locked=is_locked)
    if is_new:
        undo.callback(forget, path.unlink)
    return lock


def lock_file(descriptor: int, kind: int) -> bool:
    """Locks an open file until it is closed; False on a file system that has no locks."""
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True


def wait_for_ranks(root: Path) -> None:
    """Waits until no rank of an earlier owner works in the directory: they end when they detect that it is gone."""
    if not (root / RANKS_LOCK).exists():
        return
    with open(root / RANKS_LOCK, "ab") as lock:
        until = time.monotonic() + RANKS_GONE_S
        while True:
            try:
                lock_file(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    problem = "a rank of an earlier run still works here"
                    raise StorageError(f"{problem}; end it, or wait for its end.", where=str(root)) from None
                time.sleep(0.05)


class ScratchFolder:
    """A new folder among the system's temporary ones; it is removed by `close`, or with this object."""

    def __init__(self, kind: str) -> None:
        """`kind`: its purpose, as part of its name."""
        prefix = f"weft-{kind}-"
        _remove_left(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        lock = (self.path / f"{_OWNER_LOCK}.new").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        # It gets its name only now, so it is never visible and unlocked while its owner lives.
        (self.path / f"{_OWNER_LOCK}.new").rename(self.path / _OWNER_LOCK)
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        self._remove()


def _remove(path: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _remove_left(folder: Path, prefix: str) -> None:
    """Removes folders of this user whose owners are gone; one without a lock is just being made, or of another
    program."""
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (path / _OWNER_LOCK).open("r+b") as lock:
            if path.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
