"""Requests per minute of each tenant: a bucket that fills evenly and holds one minute's worth."""

from __future__ import annotations

import threading
import time


class RateLimits:
    """Buckets by tenant, in this process."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, tenant: str, per_minute: int | None) -> float:
        """0 if the request may pass, which it then has; else the seconds until one may."""
        if per_minute is None:
            return 0.0
        most = max(1.0, per_minute * self._share)
        rate = most / 60
        at = time.monotonic()
        with self._lock:
            level, seen = self._buckets.get(tenant, (most, at))
            level = min(most, level + (at - seen) * rate)
            if level < 1:
                self._buckets[tenant] = (level, at)
                return (1 - level) / rate if per_minute else 60.0
            self._buckets[tenant] = (level - 1, at)
            return 0.0
