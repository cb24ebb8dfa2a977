"""Who owns a run directory, said so that other machines know it too.

A lock on a network file system may hold on one machine only. So an owner also creates `.owner-<term>`, a small record
of itself, where terms count owners: of two that try to be the next, one creates the file. While it works it touches
the file, and the file system's own clock tells others how long ago that was. A successor removes the record of its
predecessor, so whoever finds the record it works under gone knows that the run is somebody else's now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import StorageError
from weft.store import json_text
from weft.store.atomic import add_guard, storage_errors

BEAT_S = 5.0
"""Seconds between two signs of life of an owner."""
GONE_S = 30.0
"""An owner on another machine that has given none for so long is taken for dead."""
_NAME = re.compile(r"\.owner-(\d{1,18})")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that owns a run, or did."""

    term: int
    """Counts the owners of the run, from 1."""
    host: str
    pid: int
    boot: str
    """Of its machine since that was started: processes with the same one see each other's locks."""
    token: str
    """Random, so that no other run has the same."""
    is_released: bool = False
    """It has let go of the run."""

    @classmethod
    def here(cls, term: int) -> Owner:
        """This process as an owner."""
        return cls(term=term, host=platform.node(), pid=os.getpid(), boot=boot_id(), token=secrets.token_hex(16))

    @classmethod
    def parse(cls, data: bytes, term: int) -> Owner:
        """The owner of a term as it was recorded; what is not there, because it is being written, is unknown."""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            known: dict[str, Any] = json_text.parse(data)
            names = {field.name for field in dataclasses.fields(cls)} & known.keys()
            return cls(**{**{name: known[name] for name in names}, "term": term})
        return cls(term=term, host="another machine", pid=0, boot="", token="")

    def encode(self) -> bytes:
        """What is recorded."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @property
    def is_of_this_machine(self) -> bool:
        """Whether it is, or was, a process of this machine since that was started."""
        return self.boot == boot_id()

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        return f"process {self.pid}" if self.is_of_this_machine else f"process {self.pid} on {self.host}"


def boot_id() -> str:
    """What all processes of this machine have in common until it is started anew."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return platform.node()


class Ownership:
    """That a process works in a directory under an owner: the owner itself, or one of its ranks."""

    def __init__(self, root: Path, owner: Owner) -> None:
        self.owner = owner
        self._root = root
        self._path = root / f".owner-{owner.term}"
        self._stop = threading.Event()
        self._unguard = add_guard(root, self.check)

    @classmethod
    def claim(cls, root: Path) -> Ownership:
        """Becomes the next owner of a directory, and gives signs of life until that ends.

        StorageError if another process is quicker. What the owner before left unfinished cannot be put in place by it
        any more, once it is removed.
        """
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
        threading.Thread(target=own._give_signs, name="weft-owner", daemon=True).start()
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
            # Opened, because only then a network file system asks its server.
            if self.owner.token.encode() in self._path.read_bytes():
                return
        successor = newest_owner(self._root)
        by = "" if successor is None else f" by {successor}"
        raise StorageError(f"was taken over{by}; this process writes nothing more there.", where=str(self._root))

    def release(self) -> None:
        """Lets go of the directory as its owner; the next need not wait."""
        self.leave()
        with contextlib.suppress(OSError), open(self._path, "r+b", buffering=0) as file:
            file.write(dataclasses.replace(self.owner, is_released=True).encode())
            file.truncate()

    def withdraw(self) -> None:
        """Lets go of the directory and leaves it as it was found, but for terms: they count on once they have begun."""
        self.release()
        if self.owner.term == 1:
            self._path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Works there no more."""
        self._stop.set()
        self._unguard()

    def _give_signs(self) -> None:
        while not self._stop.wait(BEAT_S):
            # One that cannot be given is of no harm: the next may be, and `check` tells the rest.
            with contextlib.suppress(OSError):
                os.utime(self._path)


def refuse_owned(root: Path, lock: Path, *, is_locked: bool) -> None:
    """StorageError if a process that is not known to be dead owns the directory; `is_locked`: its lock is ours.

    A lock that is ours proves that no process of this machine works there.
    """
    owner = newest_owner(root)
    if owner is None or owner.is_released or (is_locked and owner.is_of_this_machine):
        return
    age_s = _age_s(root / f".owner-{owner.term}", lock)
    if age_s is not None and age_s < GONE_S:
        raise in_use(root, age_s)


def newest_owner(root: Path) -> Owner | None:
    """The last process that became the owner of a directory, if there ever was one."""
    term = max(_terms(root), default=0)
    with storage_errors(root), contextlib.suppress(FileNotFoundError):
        return Owner.parse((root / f".owner-{term}").read_bytes(), term)
    return None


def in_use(root: Path, age_s: float | None = None) -> StorageError:
    """What whoever comes second is told; `age_s`: how long ago the owner gave its last sign of life."""
    owner, heard = newest_owner(root), ""
    hint = "Wait for its end, or name another directory."
    if age_s is not None:
        heard = f", last heard of {max(0.0, age_s):.0f} s ago"
        hint = f"Wait for its end, or until it has been silent for {GONE_S:g} s, or name another directory."
    return StorageError(f"is in use by {owner or 'another process'}{heard}.", where=str(root), hint=hint)


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
