"""What the routes share: the settings, the database, the file store, and whether the process is about to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

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


def service_of(request: Request) -> Service:
    """The service a request came to."""
    return cast(Service, request.app.state.service)
