"""Which GPUs a process may use, by the names that CUDA knows them by, and which of them are chosen; without torch."""

from __future__ import annotations

import os
from pathlib import Path

from weft.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""What CUDA shows to a process."""
AUTO = "auto"


def visible_gpus() -> list[str]:
    """Those that this process may use: what its environment names, or all whose device files are there."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    files = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return [str(place) for place in range(len(files))]


def choose_gpus(devices: str | None, visible: list[str]) -> list[str]:
    """Those of a list such as `0,2`, counted among the visible ones; all if there is no list."""
    if devices is None:
        return visible
    if not visible:
        raise ConfigError("are for GPUs, and there is none.", where="--devices")
    places = [part.strip() for part in devices.split(",")]
    for part in places:
        if not part.isdecimal() or int(part) >= len(visible):
            raise ConfigError(f"got {part!r}; accepted are numbers from 0 to {len(visible) - 1}.", where="--devices")
    return [visible[int(part)] for part in places]


def number_or_auto(text: str, where: str, least: int) -> int | None:
    """A number from `least`; None for `auto`."""
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"got {text!r}; accepted are auto and numbers from {least}.", where=where)
    return int(text)
