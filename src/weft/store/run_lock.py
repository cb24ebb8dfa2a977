"""Locks of run directories, which one process has at a time, and folders that are removed with their process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO

from weft.errors import StorageError
from weft.store.atomic import forget
from weft.store.owner import in_use, refuse_owned

LOCK = ".lock"
"""Held while a process works in the directory."""
RANKS_LOCK = ".ranks"
"""Every rank of a run holds a share of it while it works in the directory; it does not exist without ranks."""
_OWNER_LOCK = "owner.lock"
"""Held by the owner of a scratch folder."""
RANKS_GONE_S = 5.0
"""Seconds that ranks have to detect that their controller is gone."""


def take_lock(root: Path, undo: contextlib.ExitStack) -> int:
    """Locks the directory against other processes; the lock ends with this process, however it ends.

    For processes of machines that do not see the lock there is the record of the owner.
    """
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
