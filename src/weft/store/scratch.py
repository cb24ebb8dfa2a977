"""Folders for as long as a process lives; what one that was killed has left, the next of the same user removes.

A lock tells whether the owner lives, since it ends with its process however that ends.
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
    """A new folder in the system's place for such; it goes with `close`, or with this object."""

    def __init__(self, kind: str) -> None:
        """`kind`: what it is for, as part of its name."""
        prefix = f"weft-{kind}-"
        _remove_left(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        lock = (self.path / f"{LOCK}.new").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under its name only now: nobody ever finds it there and free while its owner lives.
        (self.path / f"{LOCK}.new").rename(self.path / LOCK)
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Removes it with all that is in it."""
        self._remove()


def _remove(path: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _remove_left(place: Path, prefix: str) -> None:
    """Removes folders of this user whose owners are gone; one without a lock is just being made, or is not ours."""
    for path in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (path / LOCK).open("r+b") as lock:
            if path.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
