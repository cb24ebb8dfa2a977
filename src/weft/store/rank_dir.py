"""A run directory as one of its ranks sees it: it writes the files of its jobs there, and its owner all others."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from weft.simulate.timeline import trace_json
from weft.store.atomic import storage_errors, write_file
from weft.store.run_dir import RANKS_LOCK, RunDirectory
from weft.wall_clock import TimeSplit


class RankDirectory(RunDirectory):
    """The directory of a run whose owner is another process."""

    def __init__(self, path: Path, rank: int) -> None:
        with storage_errors(path):
            lock = os.open(path / RANKS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(lock, fcntl.LOCK_SH)
        super().__init__(path, lock, contextlib.ExitStack())
        self._holds_run = True
        self._rank = rank

    @property
    def timeline_path(self) -> Path:
        """Each rank has its own; the owner makes one of them."""
        return rank_timeline(self.path, self._rank)

    def write_time(self, split: TimeSplit) -> None:
        """The owner counts the run's time."""

    def read_time(self) -> TimeSplit | None:
        """The owner counts the run's time."""
        return None


def rank_timeline(path: Path, rank: int) -> Path:
    """Where a rank writes what ran there when."""
    return path / f".timeline-{rank}.json"


def merge_timelines(path: Path, merged: Path) -> None:
    """Makes one timeline of those of all ranks, each a process of its own in it."""
    events: list[Any] = []
    for part in sorted(path.glob(".timeline-*.json")):
        rank = int(part.stem.rpartition("-")[2])
        found = json.loads(part.read_bytes())["traceEvents"]
        events += [{**event, "pid": rank + 1} for event in found]
        part.unlink()
    write_file(merged, trace_json(events))
