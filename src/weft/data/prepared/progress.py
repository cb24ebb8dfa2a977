"""The progress of preparing data that takes more than a moment: a bar on a terminal, else a line now and then.

Two bars on one terminal overwrite each other's lines. So a command with a display of its own registers it (`shown_by`)
and draws the bar itself, whichever process prepares.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft.data.rows.sources import Source
from weft.wording import counted

QUIET_S = 2.0
"""Data prepared within this time needs no bar."""
BETWEEN_LINES_S = 10.0


class Standing(NamedTuple):
    """Progress so far."""

    title: str
    num_bytes: int
    total_bytes: int | None
    """Total size; None if unknown."""
    num_rows: int


Show = Callable[[Standing | None], None]
"""Displays progress; None: it is over."""
_shows: list[Show] = []


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Progress inside it is displayed by `show` instead of standard error."""
    _shows.append(show)
    try:
        yield
    finally:
        _shows.remove(show)


def shower() -> Show | None:
    """The display in use; None for standard error."""
    return _shows[-1] if _shows else None


class Bar:
    """The bar of a terminal."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[rows]:,} rows")
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)

    def draw(self, at: Standing) -> None:
        """Moves on; data of another title starts a new bar."""
        tasks = self.progress.tasks
        if not tasks or tasks[0].description != at.title:
            for task in tasks:
                self.progress.remove_task(task.id)
            self.progress.add_task(at.title, total=at.total_bytes, rows=at.num_rows)
        self.progress.update(self.progress.task_ids[0], completed=at.num_bytes, rows=at.num_rows)


class PreparingBar:
    """Shows on standard error how much of the sources is prepared."""

    def __init__(self, sources: Sequence[Source], clock: Callable[[], float] = time.monotonic) -> None:
        self._title = f"preparing {', '.join(source.name for source in sources)}"
        is_known = not any(source.is_on_hub or source.max_rows is not None for source in sources)
        self._total = sum(file.num_text_bytes for source in sources for file in source.files) if is_known else None
        self._clock, self._begun = clock, clock()
        self._done = self._num_rows = 0
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._last_line: float | None = None
        # A worker process is silent: its standard error is another program's log.
        self._is_silent = multiprocessing.parent_process() is not None

    def __enter__(self) -> PreparingBar:
        return self

    def advance(self, num_bytes: int, num_rows: int) -> None:
        """Adds bytes prepared; `num_rows` is the total."""
        self._done += num_bytes
        self._num_rows = num_rows
        now = self._clock()
        if self._is_silent or now - self._begun <= QUIET_S:
            return
        at = Standing(self._title, self._done, self._total, num_rows)
        if (show := shower()) is not None:
            show(at)
        elif self._console.is_terminal:
            if self._bar is None:
                self._bar = Bar(self._console)
                self._bar.progress.start()
            self._bar.draw(at)
        elif self._last_line is None or now - self._last_line >= BETWEEN_LINES_S:
            self._last_line = now
            share = f" ({min(self._done / self._total, 1):.0%})" if self._total and self._done else ""
            self._print(f"{counted(num_rows, 'row')}{share}")

    def _print(self, what: str) -> None:
        self._console.print(f"{self._title}: {what}", markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if (show := shower()) is not None and not self._is_silent:
            show(None)
        if self._bar is not None:
            self._bar.progress.stop()
        if self._last_line is not None and kind is None:
            self._print(f"{counted(self._num_rows, 'row')} done in {self._clock() - self._begun:.0f} s")
