"""A run directory as one of its ranks sees it: the rank writes the files of its jobs, the owner all others."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import StorageError
from weft.store.atomic import add_guard, storage_errors
from weft.store.owner import RANKS_LOCK, Owner, Ownership, lock_file
from weft.store.run_dir import PERMIT, RunDirectory
from weft.store.wall_clock import TimeSplit


class RankDirectory(RunDirectory):
    def __init__(self, path: Path, rank: int, owner: Owner, permit: Path) -> None:
        """Writes as long as the owner leaves the permit there. StorageError if this is not the directory that the owner
        has, such as on a machine that does not share it."""
        ownership = Ownership.join(path, owner, f"rank {rank}")
        with storage_errors(path):
            lock = os.open(path / RANKS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            lock_file(lock, fcntl.LOCK_SH)
        super().__init__(path, lock, ownership, contextlib.ExitStack())
        self._holds_run = True
        self._rank = rank
        self._permit = permit
        self._unguard = add_guard(path, self._check_permit)

    def close(self) -> None:
        self._ownership.leave()
        self._unguard()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _check_permit(self) -> None:
        try:
            # Opened, because only then does a network file system query its server.
            self._permit.open("rb").close()
        except FileNotFoundError:
            gone = "the run goes on without this rank, which writes nothing more there"
            raise StorageError(f"{gone}.", where=str(self.path)) from None

    @property
    def timeline_path(self) -> Path:
        return rank_timeline(self.path, self._rank)

    def write_time(self, split: TimeSplit) -> None: ...

    def read_time(self) -> TimeSplit | None:
        return None


def grant_permit(path: Path) -> Path:
    """Lets one more rank write into a run directory; the file represents that."""
    permit = path / f"{PERMIT}{secrets.token_hex(8)}"
    with storage_errors(path):
        permit.touch()
    return permit


def revoke_permit(permit: Path | None) -> None:
    """Ends a rank's right to write, wherever it is."""
    if permit is not None:
        with contextlib.suppress(OSError):
            permit.unlink()


def rank_timeline(path: Path, rank: int) -> Path:
    return path / f".timeline-{rank}.json"


def take_timelines(path: Path, first_bands: Mapping[int, int]) -> list[Any]:
    """The spans of all ranks, which are removed there; `first_bands`: the number of each rank's first band."""
    events: list[Any] = []
    for part in sorted(path.glob(".timeline-*.json")):
        rank = int(part.stem.rpartition("-")[2])
        found = json.loads(part.read_bytes())["traceEvents"]
        events += [{**event, "pid": event["pid"] + first_bands.get(rank, rank)} for event in found]
        part.unlink()
    return events
