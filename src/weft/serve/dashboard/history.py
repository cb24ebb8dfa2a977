"""The speed and memory of each worker over the last hour, taken from the rows that workers update.

Each API process keeps its own history in memory; it is only for charts and starts anew with the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from weft.serve.db.engine import Database
from weft.serve.records.rows import DbRow
from weft.serve.records.workers import live_workers

SAMPLE_S = 5.0
"""The time between two points; a worker reports about once a second."""
NUM_POINTS = 720
"""How many points of one worker are kept: an hour's worth."""

HistoryPoint = dict[str, Any]


class History:
    """The points of each worker, oldest first. Threads may share it."""

    def __init__(self) -> None:
        self._points: dict[str, deque[HistoryPoint]] = {}
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

    def add(self, workers: list[DbRow]) -> None:
        """Appends a point of each worker that reported again, and forgets workers that were silent for an hour."""
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

    def points(self) -> dict[str, list[HistoryPoint]]:
        """Returns all points by worker."""
        with self._lock:
            return {id: list(points) for id, points in self._points.items()}
