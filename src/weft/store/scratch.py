"""Temporary folders that are removed with their process; those of a killed process are removed by the user's next one.

A lock shows whether the owner lives, since it ends with its process in any case.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

LOCK = "owner.lock"


class ScratchFolder:
    """A new folder among the system's temporary ones; it is removed by `close`, or with this object."""

    def __init__(self, kind: str) -> None:
        """`kind`: its purpose, as part of its name."""
        prefix = f"weft-{kind}-"
        _remove_left(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        lock = (self.path / f"{LOCK}.new").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        # It gets its name only now, so it is never visible and unlocked while its owner lives.
        (self.path / f"{LOCK}.new").rename(self.path / LOCK)
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
        with contextlib.suppress(OSError), (path / LOCK).open("r+b") as lock:
            if path.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
