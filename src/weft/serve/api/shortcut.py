"""The short way to what clients poll: one job, and the newest jobs, asked for without parameters.

The framework takes several times as long to find such a route and to check what it has no parameters for as the route
takes to answer. This layer, in front of all others, knows the two paths and calls the same functions with the same
caller; everything else, and the same paths with a query, goes the long way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from weft.errors import WeftError
from weft.serve.api import jobs
from weft.serve.api.auth import needs
from weft.serve.api.errors import ApiError, as_api_error
from weft.serve.api.metrics import Metrics
from weft.serve.api.observe import Observe

_POLLED = re.compile(rf"{jobs.router.prefix}(?:/([^/]+))?")
_caller = needs("jobs")


@dataclass(frozen=True)
class _Route:
    """As logs and metrics name it."""

    path: str


_ONE, _ALL = _Route(f"{jobs.router.prefix}/{{job_id}}"), _Route(jobs.router.prefix)


class Shortcut:
    """The way past the framework; what is answered here is observed like everything else."""

    def __init__(self, app: FastAPI, metrics: Metrics) -> None:
        self._app = app
        self._observed = Observe(_serve, metrics)

    async def answers(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answers a request that it knows; False if it does not."""
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
