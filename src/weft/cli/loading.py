"""The line that says what a command waits for: on a terminal at once, with a bar below it while data is prepared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group

from weft.data.prepared.progress import QUIET_S, Bar, Standing, shown_by


@contextmanager
def loading(console: Console, what: str = "loading the backbone and the data") -> Iterator[None]:
    """Shows what goes on inside, and how far preparing data has come where that takes long."""
    if not console.is_terminal:
        with _printed_if_slow(console, what):
            yield
        return
    with console.status(what) as status:
        bar = Bar(console)

        def show(at: Standing | None) -> None:
            if at is None:
                status.update(what)
            else:
                bar.draw(at)
                status.update(Group(what, bar.progress))

        with shown_by(show):
            yield


@contextmanager
def _printed_if_slow(console: Console, what: str) -> Iterator[None]:
    """Prints the line when nothing has come for a while: who reads a log asks why, too."""
    timer = threading.Timer(QUIET_S, console.print, [what], {"highlight": False})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
