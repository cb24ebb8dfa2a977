"""A short way to the two routes that clients poll: one job, and the list of the newest jobs, without parameters.

FastAPI takes several times as long to find such a route, and to check parameters it does not have, as the route takes
to answer. This layer lies in front of all others, knows the two paths, and calls the same functions with the same
caller; every other request, and the same paths with a query, goes through FastAPI.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from weft.errors import WeftError
from weft.serve.api.auth import needs
from weft.serve.api.errors import ApiError, as_api_error
from weft.serve.api.metrics import Metrics
from weft.serve.api.observe import RequestObserver
from weft.serve.api.routes import jobs

_POLLED = re.compile(rf"{jobs.router.prefix}(?:/([^/]+))?")
_caller = needs("jobs")


@dataclass(frozen=True)
class _Route:
    """The name of a route in logs and metrics."""

    path: str


_ONE, _ALL = _Route(f"{jobs.router.prefix}/{{job_id}}"), _Route(jobs.router.prefix)


class PolledRoutes:
    """Answers the polled routes without FastAPI; logs and metrics count them like all others."""

    def __init__(self, app: FastAPI, metrics: Metrics) -> None:
        self._app = app
        self._observed = RequestObserver(_serve, metrics)

    async def answers(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answers the request if it is for one of the two routes; returns whether it was."""
        is_plain = scope["type"] == "http" and scope["method"] == "GET" and not scope["query_string"]
        found = _POLLED.fullmatch(scope["path"]) if is_plain else None
        if found is None:
            return False
        route, parameters = _ONE if found[1] else _ALL, {"job_id": found[1]}
        scope.update({"app": self._app, "route": route, "path_params": parameters})
        await self._observed(scope, receive, send)
        return True


async def _serve(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        response = await _answer(Request(scope, receive), scope["path_params"]["job_id"])
    except (ApiError, WeftError) as error:
        response = as_api_error(error).response()
    await response(scope, receive, send)


async def _answer(request: Request, job_id: str | None) -> Response:
    user = await _caller(request)
    return await (jobs.list_jobs(request, user) if job_id is None else jobs.retrieve(request, user, job_id))
