"""The line on a terminal that says what a command waits for, with a bar below it while data is prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group

from weft.data.prepared.progress import Bar, Standing, shown_by


@contextmanager
def loading(console: Console, what: str = "loading the backbone and the data") -> Iterator[None]:
    """Shows what goes on inside, and how far preparing data has come where that takes long."""
    with console.status(what) as status:
        if not console.is_terminal:
            yield
            return
        bar = Bar(console)

        def show(at: Standing | None) -> None:
            if at is None:
                status.update(what)
            else:
                bar.draw(at)
                status.update(Group(what, bar.progress))

        with shown_by(show):
            yield
