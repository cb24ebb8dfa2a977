"""/v1/usage: what the tenant has used, and its limits."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from weft.serve.api.auth import UsageUser
from weft.serve.api.service import service_of
from weft.serve.jobs.quota import token_usage
from weft.serve.records import files, jobs, usage

router = APIRouter(prefix="/v1", tags=["Usage"])
UnixTime = Annotated[int | None, Query(ge=0, lt=2**53)]


@router.get("/usage")
def read_usage(
    request: Request, user: UsageUser, start_time: UnixTime = None, end_time: UnixTime = None
) -> dict[str, Any]:
    """Tokens trained, asked and answered, of what began within [start_time, end_time); and the limits as of now."""
    with service_of(request).database.read() as tx:
        used = usage.usage_of(tx, user.tenant, start=start_time, end=end_time)
        tokens = token_usage(tx, user.tenant)
        limits = {
            "active_jobs": (jobs.count_active(tx, user.tenant), user.owner["max_active_jobs"]),
            "trained_tokens": (tokens.trained, user.owner["max_trained_tokens"]),
            "stored_bytes": (files.stored_bytes(tx, user.tenant), user.owner["max_stored_bytes"]),
        }
    shown: dict[str, Any] = {name: {"used": now, "limit": most} for name, (now, most) in limits.items()}
    # What unfinished jobs are yet to train counts against the limit as well.
    shown["trained_tokens"]["reserved"] = tokens.reserved
    return {
        "object": "usage",
        "organization_id": user.tenant,
        "trained_tokens": used["totals"]["trained"],
        "prompt_tokens": used["totals"]["prompt"],
        "completion_tokens": used["totals"]["completion"],
        "by_model": used["by_model"],
        "limits": shown,
    }
