"""Paths as users write them on the command line: `~` is their home, and an empty one is refused, not taken for here."""

from __future__ import annotations

from pathlib import Path

import typer


def user_path(text: str) -> Path:
    """The path that a user means."""
    if not text:
        raise typer.BadParameter("is empty; name a file or a directory.")
    return Path(text).expanduser()
