"""What the routes of one API process share: settings, database, file store, rate limits, and whether it is stopping."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

from weft.serve.api.metrics import Metrics
from weft.serve.api.read_cache import ReadCache
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database
from weft.serve.settings import Settings


class RateLimits:
    """Limits each tenant's requests per minute in this process: a bucket fills evenly and holds one minute's worth."""

    def __init__(self, share: float = 1.0) -> None:
        """`share` is the part of a tenant's limit that this process may grant."""
        self._share = share
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, tenant: str, per_minute: int | None) -> float:
        """Counts a request and returns 0 if it may pass; otherwise returns the seconds until one may."""
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


@dataclass
class ApiService:
    """One API process."""

    settings: Settings
    database: Database
    blobs: Blobs
    metrics: Metrics
    rates: RateLimits = field(default_factory=RateLimits)
    is_draining: bool = False
    touched: dict[str, float] = field(default_factory=dict)
    """When this process last noted that a key was used, by the key's id."""
    checked: dict[tuple[str | int | None, ...], int] = field(default_factory=dict)
    """The number of samples in files that passed the check, by blob, requested format and fewest lines."""

    def __post_init__(self) -> None:
        self.read_cache = ReadCache(self.database)
        """Answers of reads that many clients repeat."""


def service_of(request: Request) -> ApiService:
    """Returns the service to which a request came."""
    return cast(ApiService, request.app.state.service)
