"""Guards over directories: each is called before anything below its directory is renamed into place, appended to or
removed.

A process sets one for a directory that another process may take over; it raises once that has happened. So pending
writes of a process that was cut off never reach the files of its successor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from weft.errors import StorageError

_lock = threading.Lock()
_guards: list[tuple[Path, Callable[[], None]]] = []


def add_guard(root: Path, check: Callable[[], None]) -> Callable[[], None]:
    """Calls `check` from now on before a change below `root`; returns a function that removes the guard."""
    entry = (root.absolute(), check)
    with _lock:
        _guards.append(entry)

    def remove() -> None:
        with _lock:
            if entry in _guards:
                _guards.remove(entry)

    return remove


def check_guards(path: Path) -> None:
    """Raises the error of a guard of a directory above `path`."""
    if not _guards:
        return
    with _lock:
        known = list(_guards)
    absolute = path.absolute()
    for entry in known:
        root, check = entry
        if not absolute.is_relative_to(root):
            continue
        try:
            check()
        except StorageError:
            with _lock:
                if entry in _guards:
                    raise
            # The guard was removed while it was called, so its error does not concern this write.
