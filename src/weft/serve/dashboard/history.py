"""How fast workers were and how much memory they took, over the last hour, from their signs of life.

Kept in the memory of each API process: it is for looking at, and starts anew with the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from weft.serve.db.engine import Database
from weft.serve.records.rows import Record
from weft.serve.records.workers import live_workers

SAMPLE_S = 5.0
"""Time between two points; a worker reports about once a second."""
NUM_POINTS = 720
"""Points of one worker: an hour."""

Point = dict[str, Any]


class History:
    """Points of each worker, oldest first; safe to share between threads."""

    def __init__(self) -> None:
        self._points: dict[str, deque[Point]] = {}
        self._due = 0.0
        self._lock = threading.Lock()

    def sample(self, database: Database) -> None:
        """Takes a point of every live worker, unless the last one was taken less than SAMPLE_S ago."""
        with self._lock:
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + SAMPLE_S
        with database.read() as tx:
            workers = live_workers(tx)
        self.add(workers)

    def add(self, workers: list[Record]) -> None:
        """Appends a point of each worker that has been seen again, and forgets workers silent for the whole time."""
        with self._lock:
            for worker in workers:
                points = self._points.setdefault(worker["id"], deque(maxlen=NUM_POINTS))
                if points and points[-1]["at"] >= worker["seen_at"]:
                    continue
                info = worker["info"]
                speed, memory = info.get("tokens_per_s"), info.get("memory_bytes")
                points.append({"at": worker["seen_at"], "tokens_per_second": speed, "memory_bytes": memory})
            newest = max((points[-1]["at"] for points in self._points.values()), default=0.0)
            oldest = newest - SAMPLE_S * NUM_POINTS
            self._points = {id: points for id, points in self._points.items() if points[-1]["at"] > oldest}

    def points(self) -> dict[str, list[Point]]:
        """What is known, by worker."""
        with self._lock:
            return {id: list(points) for id, points in self._points.items()}
