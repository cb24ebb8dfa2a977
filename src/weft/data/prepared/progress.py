"""A progress bar on the terminal while data is prepared, if that takes more than a moment."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft.data.rows.sources import Source

QUIET_S = 2.0
"""What is done by then needs no bar."""


class PreparingBar:
    """Shows how much of the sources is prepared, on standard error and only where that is a terminal."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._title = f"preparing {', '.join(source.name for source in sources)}"
        is_known = not any(source.is_on_hub for source in sources)
        self._total = sum(file.num_text_bytes for source in sources for file in source.files) if is_known else None
        self._begun, self._done = time.monotonic(), 0
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rows]:,} rows")
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._is_shown = False

    def __enter__(self) -> PreparingBar:
        return self

    def advance(self, num_bytes: int, num_rows: int) -> None:
        """So many bytes more are prepared, so many rows in all."""
        self._done += num_bytes
        if not self._is_shown and self._progress.console.is_terminal and time.monotonic() - self._begun > QUIET_S:
            self._is_shown = True
            self._progress.add_task(self._title, total=self._total, rows=num_rows)
            self._progress.start()
        if self._is_shown:
            self._progress.update(self._progress.task_ids[0], completed=self._done, rows=num_rows)

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._progress.stop()
