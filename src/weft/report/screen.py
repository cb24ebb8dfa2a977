"""A place in the terminal that is redrawn while something runs, and lines above it; in a pipe or a log, lines alone."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from weft.report import readable


class Screen:
    """Shows what `render` returns, four times a second, between `start` and `stop`."""

    def __init__(self, console: Console, render: Callable[[], RenderableType]) -> None:
        self._console = console
        is_screen = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
        self._live = Live(console=console, get_renderable=render, refresh_per_second=4, transient=True)
        self.is_redrawn = is_screen
        """Otherwise only what is said is seen."""

    def start(self) -> None:
        """Draws it for the first time."""
        if self.is_redrawn:
            self._live.start(refresh=True)

    def stop(self) -> None:
        """Takes it away again."""
        if self.is_redrawn:
            self._live.stop()

    def say(self, line: str, style: str = "") -> None:
        """Prints one line, whatever is in it: a log may take ASCII only, and a name must not end a run."""
        encoding = self._console.encoding
        shown = readable.one_line(line).encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(Text(shown, style=style), soft_wrap=not self.is_redrawn)
