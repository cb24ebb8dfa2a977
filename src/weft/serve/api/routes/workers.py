"""/v1/workers: the machines behind the service, for operators, who drain workers and send them away."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from weft.serve.api.auth import Caller, Operator
from weft.serve.api.responses import worker_object
from weft.serve.api.service import ApiService, service_of
from weft.serve.db.engine import now
from weft.serve.jobs.drain import steer_workers
from weft.serve.records.workers import all_workers, held_by_worker

router = APIRouter(prefix="/v1/workers", tags=["Operations"])


@router.get("")
def list_workers(request: Request, user: Operator) -> dict[str, Any]:
    """All workers with their machines, also those that are lost; needs a key with the scope `admin`."""
    with service_of(request).database.read() as tx:
        held, at = held_by_worker(tx), now(tx)
        return {"object": "list", "data": [worker_object(row, held, at) for row in all_workers(tx)]}


@router.post("/{worker}/drain")
def drain(request: Request, worker: str, user: Operator) -> dict[str, Any]:
    """Has a worker, or all workers of a machine, save their jobs, give them to others and claim no more."""
    return _steer(service_of(request), user, worker, "drain")


@router.post("/{worker}/undrain")
def undrain(request: Request, worker: str, user: Operator) -> dict[str, Any]:
    """Lets drained workers claim jobs again."""
    return _steer(service_of(request), user, worker, "undrain")


@router.post("/{worker}/remove")
def remove(request: Request, worker: str, user: Operator) -> dict[str, Any]:
    """Has workers give their jobs to others and end for good; those that are lost are forgotten."""
    return _steer(service_of(request), user, worker, "remove")


def _steer(service: ApiService, user: Caller, target: str, wish: str) -> dict[str, Any]:
    with service.database.begin() as tx:
        asked = steer_workers(tx, target, wish)
        user.note(tx, f"worker.{wish}", target, data={"workers": [row["id"] for row in asked]})
        held, at = held_by_worker(tx), now(tx)
        ids = {row["id"] for row in asked}
        left = [worker_object(row, held, at) for row in all_workers(tx) if row["id"] in ids]
    return {"object": "list", "data": left}
