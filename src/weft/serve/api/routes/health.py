"""/healthz, /readyz and /metrics: what load balancers and monitoring ask."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response

from weft import __version__
from weft.serve.api.auth import Operator
from weft.serve.api.errors import unavailable
from weft.serve.api.metrics import CONTENT_TYPE
from weft.serve.api.service import service_of
from weft.serve.records.workers import live_workers

router = APIRouter(tags=["Operations"])


@router.get("/healthz")
async def healthz() -> dict[str, Any]:
    """The process is alive; says nothing of anything else."""
    return {"status": "ok", "version": __version__}


@router.get("/readyz")
def readyz(request: Request) -> dict[str, Any]:
    """The database answers and the process is not about to stop; also how many workers are alive."""
    service = service_of(request)
    if service.is_draining:
        raise unavailable("The server is stopping.", "draining")
    with service.database.read() as tx:
        tx.execute(sa.select(1))
        num_workers = len(live_workers(tx))
    return {"status": "ready", "workers": num_workers}


@router.get("/metrics", response_class=Response)
def metrics(request: Request, user: Operator) -> Response:
    """Prometheus' format; needs a key with the scope `admin`."""
    return Response(service_of(request).metrics.text(), headers={"content-type": CONTENT_TYPE})
