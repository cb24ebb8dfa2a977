"""The page's files, read once from the package; nothing outside it has a name here."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

PAGE = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files of other kinds are not served."""


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    content: bytes
    kind: str
    tag: str
    """Changes with the content: browsers ask with it whether theirs is still the latest."""


@functools.cache
def assets() -> Mapping[str, Asset]:
    """Every file of the page by its path in `static`."""
    return dict(_walk(files(__package__) / "static", ""))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _walk(entry, f"{name}/")
            continue
        kind = next((kind for end, kind in KINDS.items() if name.endswith(end)), None)
        if kind is not None:
            content = entry.read_bytes()
            yield name, Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:24]}"')
