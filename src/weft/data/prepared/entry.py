"""One entry of the cache: a folder with the arrays of prepared data and a page that describes them.

Sizes and checksums are compared before it is used. Only large files that have not changed since they were written are
not read again for that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from weft.data.dataset import Dataset, DataSummary
from weft.data.prepared.arrays import open_samples
from weft.objectives.registry import OBJECTIVES

PAGE = "entry.json"
USED = "used"
"""A file whose time is the time of last use."""
ALWAYS_READ_BYTES = 64 * 2**20
"""Files up to this size are compared with their checksums each time."""
READ_BYTES = 2**22


def write_entry(folder: Path, data: Dataset) -> None:
    """Completes a folder that holds the arrays of `data`; afterwards all of it is durable."""
    files = {path.name: _described(path) for path in sorted(folder.glob("*.npy"))}
    page = {
        "summary": dataclasses.asdict(data.summary),
        "objective": data.objective.name,
        "source_groups": data.sizes,
        "has_rows": data.rows is not None,
        "fingerprint": data.fingerprint,
        "token_range": data.samples.arrays.token_range,
        "files": files,
        "created": time.time(),
    }
    text = json.dumps(page)
    (folder / USED).touch()
    path = folder / PAGE
    path.write_text(json.dumps({"page": text, "sha256": _digest(text)}))
    for name in (*files, PAGE):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def read_entry(folder: Path) -> Dataset | None:
    """The data of an entry, its arrays mapped; None if it is broken or missing."""
    try:
        page = read_page(folder)
        if page is None or not all(_is_sound(folder / name, stated) for name, stated in page["files"].items()):
            return None
        samples, rows = open_samples(folder, tuple(page["token_range"]), page["fingerprint"])
        summary = page["summary"]
        summary = DataSummary(**{**summary, "sources": tuple(summary["sources"]), "notes": tuple(summary["notes"])})
        sizes = tuple(page["source_groups"])
        return Dataset(samples, summary, OBJECTIVES[page["objective"]], sizes, rows if page["has_rows"] else None)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def read_page(folder: Path) -> dict[str, Any] | None:
    """The description of an entry; None if it cannot be read."""
    try:
        whole = json.loads((folder / PAGE).read_text())
        page: dict[str, Any] = json.loads(whole["page"])
        return page if whole["sha256"] == _digest(whole["page"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _described(path: Path) -> dict[str, int]:
    result = path.stat()
    return {"bytes": result.st_size, "mtime_ns": result.st_mtime_ns, "crc32": _checksum(path)}


def _is_sound(path: Path, stated: dict[str, int]) -> bool:
    result = path.stat()
    if result.st_size != stated["bytes"]:
        return False
    is_untouched = result.st_mtime_ns == stated["mtime_ns"]
    return (is_untouched and result.st_size > ALWAYS_READ_BYTES) or _checksum(path) == stated["crc32"]


def _checksum(path: Path) -> int:
    result = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            result = zlib.crc32(block, result)
    return result


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
