"""What the routes share: the settings, the database, the file store, and whether the process is about to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

from weft.serve.api.fresh import Fresh
from weft.serve.api.metrics import Metrics
from weft.serve.api.rate import RateLimits
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database
from weft.serve.settings import Settings


@dataclass
class Service:
    """One API process."""

    settings: Settings
    database: Database
    blobs: Blobs
    metrics: Metrics
    rates: RateLimits = field(default_factory=RateLimits)
    is_draining: bool = False
    touched: dict[str, float] = field(default_factory=dict)
    """When this process last noted that a key was used, by the key's id."""
    checked: dict[tuple[str, str, int | None], int] = field(default_factory=dict)
    """Samples in files that were found to be fit for training: by blob, format asked for, and fewest lines."""

    def __post_init__(self) -> None:
        self.fresh = Fresh(self.database)
        """Reads that many clients repeat."""


def service_of(request: Request) -> Service:
    """The service a request came to."""
    return cast(Service, request.app.state.service)
