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
from weft.store.owner import Owner, Ownership
from weft.store.run_dir import RANKS_LOCK, RunDirectory, lock_file
from weft.wall_clock import TimeSplit


class RankDirectory(RunDirectory):
    """The directory of a run whose owner is another process."""

    def __init__(self, path: Path, rank: int, owner: Owner) -> None:
        """StorageError if this is not the directory that the owner has, such as on a machine that does not share it."""
        ownership = Ownership.join(path, owner, f"rank {rank}")
        with storage_errors(path):
            lock = os.open(path / RANKS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            lock_file(lock, fcntl.LOCK_SH)
        super().__init__(path, lock, ownership, contextlib.ExitStack())
        self._holds_run = True
        self._rank = rank

    def close(self) -> None:
        """Works there no more; the run stays its owner's."""
        self._ownership.leave()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

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
