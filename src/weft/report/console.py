"""The output console: a terminal with a width, or a pipe without one."""

from __future__ import annotations

import os

from rich.console import Console

PIPE_COLUMNS = 10_000
"""Wider than any line: a reader of a pipe needs every line and every cell whole."""


def output_console(*, markup: bool = True) -> Console:
    """The console on stdout; into a pipe or a file it neither wraps nor cuts, unless COLUMNS sets a width.

    Without `markup`, brackets in a text are brackets.
    """
    console = Console(markup=markup)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_COLUMNS
    return console
