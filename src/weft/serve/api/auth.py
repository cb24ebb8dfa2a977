"""Who is asking: a key of a tenant with the scope the route needs, or everybody as `default` without auth."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from weft.serve.api.errors import ApiError, too_many, unavailable
from weft.serve.api.service import Service, service_of
from weft.serve.db.engine import Tx
from weft.serve.errors import Busy
from weft.serve.records import audit
from weft.serve.records.keys import SCOPES, find_key, key_basis, needs_touch, touch_key
from weft.serve.records.rows import Record
from weft.serve.records.tenants import DEFAULT_TENANT, get_tenant


@dataclass(frozen=True)
class Caller:
    """A tenant with a right to be here, and what to write about it in logs and audit."""

    tenant: str
    owner: Record
    """The tenant's row: its limits."""
    key: str | None
    """The id of its key."""
    scopes: tuple[str, ...]
    request: str
    """The request's id."""

    def note(self, tx: Tx, action: str, object: str = "", data: Any = None) -> None:
        """Writes an action down in the audit table, in the transaction that does it."""
        audit.note(tx, self.tenant, action, object, key=self.key, request=self.request, data=data)


def needs(scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """A dependency: the caller, if it has this scope."""
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


async def _caller(request: Request, service: Service) -> Caller:
    id = request.state.request_id
    if not service.settings.auth:
        owner = await service.fresh.read(("tenant", DEFAULT_TENANT), lambda tx: get_tenant(tx, DEFAULT_TENANT))
        return Caller(DEFAULT_TENANT, owner, None, SCOPES, id)
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not text.strip():
        message = "You didn't provide an API key; send it as 'Authorization: Bearer YOUR_KEY'."
        raise ApiError(401, message, headers={"www-authenticate": "Bearer"})
    key = await service.fresh.read(("key", text), lambda tx: find_key(tx, text.strip()), key_basis(text.strip()))
    if key is None:
        # One answer for unknown, wrong, revoked and disabled, without the key in it.
        raise ApiError(
            401, "Incorrect API key provided.", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
    at = time.time()
    if needs_touch(key, at) and needs_touch({"last_used_at": service.touched.get(key["id"])}, at):
        # One request writes it down; those that come meanwhile find it done.
        service.touched[key["id"]] = at
        await run_in_threadpool(_touch, service, key)
    return Caller(key["tenant"], key["owner"], key["id"], tuple(key["scopes"]), id)


def _touch(service: Service, key: Record) -> None:
    # When it was last used is not worth refusing a request that can be answered.
    with contextlib.suppress(Busy), service.database.begin() as tx:
        touch_key(tx, key["tenant"], key["id"])
