"""The short way to what clients poll: one job, and the newest jobs, asked for without parameters.

The framework takes several times as long to find such a route and to check what it has no parameters for as the route
takes to answer. This layer knows the two paths and calls the same functions with the same caller; everything else, and
the same paths with a query, goes the long way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.errors import WeftError
from weft.serve.api import jobs
from weft.serve.api.auth import needs
from weft.serve.api.errors import ApiError, as_api_error

_POLLED = re.compile(rf"{jobs.router.prefix}(?:/([^/]+))?")
_caller = needs("jobs")


@dataclass(frozen=True)
class _Route:
    """As logs and metrics name it."""

    path: str


_ONE, _ALL = _Route(f"{jobs.router.prefix}/{{job_id}}"), _Route(jobs.router.prefix)


class Shortcut:
    """A layer of the app, inside the one that observes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        is_plain = scope["type"] == "http" and scope["method"] == "GET" and not scope["query_string"]
        found = _POLLED.fullmatch(scope["path"]) if is_plain else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ONE if found[1] else _ALL
        try:
            response = await _answer(Request(scope, receive), found[1])
        except (ApiError, WeftError) as error:
            response = as_api_error(error).response()
        await response(scope, receive, send)


async def _answer(request: Request, job_id: str | None) -> Response:
    user = await _caller(request)
    return await (jobs.list_jobs(request, user) if job_id is None else jobs.retrieve(request, user, job_id))
