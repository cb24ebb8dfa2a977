"""Paths as users write them on the command line: `~` is their home, and an empty one is refused, not taken for here.

Where a run is may also be a URL that fsspec knows, such as s3://bucket/runs/first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from weft.store.remote.run_url import RunUrl


def user_path(text: str) -> Path:
    """The path that a user means."""
    if not text:
        raise typer.BadParameter("is empty; name a file or a directory.")
    return Path(text).expanduser()


def run_location(text: str) -> Path | RunUrl:
    """The directory or URL of a run that a user means."""
    if "://" not in text:
        return user_path(text)
    if text.startswith("file://"):
        return user_path(text.removeprefix("file://"))
    from weft.store.remote.run_url import RunUrl

    return RunUrl(text.rstrip("/"))


def trained_in(
    place: Path | RunUrl, *, resume: bool, notify: Callable[[str], None]
) -> contextlib.AbstractContextManager[Path]:
    """The local directory of a run that is trained; what is behind a URL is owned and kept up to date meanwhile."""
    if isinstance(place, Path):
        return contextlib.nullcontext(place)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return place.trained(Path(home) / "weft" / "runs", resume=resume, notify=notify)


def looked_at(place: Path | RunUrl) -> contextlib.AbstractContextManager[Path]:
    """The local directory of a run that is only read; behind a URL, a copy without tensors."""
    return contextlib.nullcontext(place) if isinstance(place, Path) else place.looked_at()
