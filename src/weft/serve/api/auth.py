"""Finds out who sends a request: a tenant whose key has the scope the route needs, or `default` without auth."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from weft.serve.api.errors import ApiError, too_many, unavailable
from weft.serve.api.service import ApiService, service_of
from weft.serve.db.engine import Tx
from weft.serve.errors import Busy
from weft.serve.records import audit
from weft.serve.records.keys import SCOPES, find_key, needs_touch, touch_key, watched_key
from weft.serve.records.rows import DbRow
from weft.serve.records.tenants import DEFAULT_TENANT, get_tenant


@dataclass(frozen=True)
class Caller:
    """The tenant that sent a request with a valid key, and what logs and the audit table say about it."""

    tenant: str
    owner: DbRow
    """The tenant's row, which holds its limits."""
    key: str | None
    """The id of the key, not the key itself."""
    scopes: tuple[str, ...]
    request: str
    """The request's id."""

    def note(self, tx: Tx, action: str, object: str = "", data: Any = None) -> None:
        """Adds an action to the audit table, in the transaction that performs it."""
        audit.note(tx, self.tenant, action, object, key=self.key, request=self.request, data=data)


def needs(scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """Makes a FastAPI dependency that returns the caller, provided its key has this scope."""
    assert scope in SCOPES

    async def caller(request: Request) -> Caller:
        service = service_of(request)
        if service.is_draining and request.method == "POST":
            raise unavailable("The server is stopping.", "draining")
        found = await _caller(request, service)
        request.state.log.update(tenant=found.tenant, key=found.key)
        if scope not in found.scopes:
            message = f"This key lacks the scope '{scope}'; it has {', '.join(found.scopes)}."
            raise ApiError(403, message, code="missing_scope")
        wait_s = service.rates.wait_s(found.tenant, found.owner["max_requests_per_minute"])
        if wait_s > 0:
            limit = found.owner["max_requests_per_minute"]
            message = f"Rate limit reached: {limit:,} requests per minute. Try again in {wait_s:.1f} s."
            raise too_many(message, "rate_limit_exceeded", retry_after_s=math.ceil(wait_s))
        return found

    caller.scope = scope  # type: ignore[attr-defined]
    return caller


async def _caller(request: Request, service: ApiService) -> Caller:
    id = request.state.request_id
    if not service.settings.auth:
        owner = await service.read_cache.read(("tenant", DEFAULT_TENANT), lambda tx: get_tenant(tx, DEFAULT_TENANT))
        return Caller(DEFAULT_TENANT, owner, None, SCOPES, id)
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not text.strip():
        message = "You didn't provide an API key; send it as 'Authorization: Bearer YOUR_KEY'."
        raise ApiError(401, message, headers={"www-authenticate": "Bearer"})
    key = await service.read_cache.read(("key", text), lambda tx: find_key(tx, text.strip()), watched_key(text.strip()))
    if key is None:
        # Unknown, wrong, revoked and disabled keys get the same answer, and it does not quote the key.
        raise ApiError(
            401, "Incorrect API key provided.", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
    at = time.time()
    if needs_touch(key, at) and needs_touch({"last_used_at": service.touched.get(key["id"])}, at):
        # Only one request writes this; those that come meanwhile find it done.
        service.touched[key["id"]] = at
        await run_in_threadpool(_touch, service, key)
    return Caller(key["tenant"], key["owner"], key["id"], tuple(key["scopes"]), id)


def _touch(service: ApiService, key: DbRow) -> None:
    # A request that can be answered is not refused only because this note cannot be written.
    with contextlib.suppress(Busy), service.database.begin() as tx:
        touch_key(tx, key["tenant"], key["id"])


FilesUser = Annotated[Caller, Depends(needs("files"))]
JobsUser = Annotated[Caller, Depends(needs("jobs"))]
ModelsUser = Annotated[Caller, Depends(needs("models"))]
ChatUser = Annotated[Caller, Depends(needs("chat"))]
UsageUser = Annotated[Caller, Depends(needs("usage"))]
Operator = Annotated[Caller, Depends(needs("admin"))]
"""Parameters of routes: the caller, whose key must have that scope."""
