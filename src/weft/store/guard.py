"""Guards over directories: each is asked before anything below its directory is put in place, added to or taken away.

Whoever works in a directory that another process may take over sets one; it raises once that has happened. So what a
process that was cut off still has in hand never reaches the files of its successor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from weft.errors import StorageError

_lock = threading.Lock()
_guards: list[tuple[Path, Callable[[], None]]] = []


def add_guard(root: Path, check: Callable[[], None]) -> Callable[[], None]:
    """Asks `check` from now on before a change below `root`; returns what ends that."""
    entry = (root.absolute(), check)
    with _lock:
        _guards.append(entry)

    def remove() -> None:
        with _lock:
            if entry in _guards:
                _guards.remove(entry)

    return remove


def ask_guards(path: Path) -> None:
    """Raises what a guard of a directory above `path` raises."""
    if not _guards:
        return
    with _lock:
        known = list(_guards)
    place = path.absolute()
    for entry in known:
        root, check = entry
        if not place.is_relative_to(root):
            continue
        try:
            check()
        except StorageError:
            with _lock:
                if entry in _guards:
                    raise
            # Whoever set it left while it was asked, and what it said is not about whoever writes here.
