"""How far preparing data has come, if that takes more than a moment: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft.data.rows.sources import Source

QUIET_S = 2.0
"""What is done by then needs no bar."""
BETWEEN_LINES_S = 10.0


class PreparingBar:
    """Shows on standard error how much of the sources is prepared."""

    def __init__(self, sources: Sequence[Source], clock: Callable[[], float] = time.monotonic) -> None:
        self._title = f"preparing {', '.join(source.name for source in sources)}"
        is_known = not any(source.is_on_hub or source.max_rows is not None for source in sources)
        self._total = sum(file.num_text_bytes for source in sources for file in source.files) if is_known else None
        self._clock, self._begun = clock, clock()
        self._done = self._num_rows = 0
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rows]:,} rows")
        self._console = Console(stderr=True)
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
        self._last_line: float | None = None
        # A process that somebody started for a file speaks to nobody: its standard error is somebody else's log.
        self._is_silent = multiprocessing.parent_process() is not None

    def __enter__(self) -> PreparingBar:
        return self

    def advance(self, num_bytes: int, num_rows: int) -> None:
        """So many bytes more are prepared, so many rows in all."""
        self._done += num_bytes
        self._num_rows = num_rows
        now = self._clock()
        if self._is_silent or now - self._begun <= QUIET_S:
            return
        if self._console.is_terminal:
            self._show()
        elif self._last_line is None or now - self._last_line >= BETWEEN_LINES_S:
            self._last_line = now
            share = f" ({min(self._done / self._total, 1):.0%})" if self._total and self._done else ""
            self._say(f"{num_rows:,} rows{share}")

    def _show(self) -> None:
        if not self._progress.task_ids:
            self._progress.add_task(self._title, total=self._total, rows=self._num_rows)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=self._done, rows=self._num_rows)

    def _say(self, what: str) -> None:
        self._console.print(f"{self._title}: {what}", markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._progress.task_ids:
            self._progress.stop()
        if self._last_line is not None and kind is None:
            self._say(f"{self._num_rows:,} rows done in {self._clock() - self._begun:.0f} s")
