"""Puts the app together from its routes, errors, logs and limits, and runs it on a socket. It never imports torch.

On SIGTERM or SIGINT the app finishes the requests it has begun and returns.

Two routes have a short way: one job, and the list of the newest jobs, without parameters, which clients poll. FastAPI
takes several times as long to find such a route, and to check parameters it does not have, as the route takes to
answer. `PolledRoutes` lies in front of all other layers, knows the two paths, and calls the same functions with the
same caller; every other request, and the same paths with a query, goes through FastAPI.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import anyio.to_thread
import sqlalchemy as sa
import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from weft import __version__
from weft.errors import ConfigError, WeftError
from weft.serve.api import errors
from weft.serve.api.chat_routes import chat_router
from weft.serve.api.errors import ApiError, as_api_error, unavailable
from weft.serve.api.file_routes import file_router, upload_router
from weft.serve.api.job_routes import event_router, job_router, list_jobs, retrieve
from weft.serve.api.model_routes import model_router, usage_router, worker_router
from weft.serve.api.observe import CONTENT_TYPE, Metrics, RequestObserver
from weft.serve.api.requests import BODIES
from weft.serve.api.sampler import Sampler
from weft.serve.api.service import ApiService, Operator, RateLimits, needs, service_of
from weft.serve.blobs import Blobs
from weft.serve.connections import TimedConnection, allow_many_connections
from weft.serve.dashboard.routes import router as dashboard_router
from weft.serve.db.engine import Database
from weft.serve.db.workers import live_workers
from weft.serve.settings import Settings

NUM_THREADS = 100
"""How many requests are worked on at once; most of their time they wait for the database or a worker."""


class _App(FastAPI):
    polled: PolledRoutes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await self.polled.answers(scope, receive, send):
            await super().__call__(scope, receive, send)


def make_app(settings: Settings, database: Database, blobs: Blobs) -> FastAPI:
    app = _App(
        title="Weft",
        version=__version__,
        description="Fine-tuning with OpenAI's API: many adapters at once on one frozen model.",
        redirect_slashes=False,
        lifespan=_threads,
        # FastAPI's own pages load their scripts from the internet, which may be out of reach.
        docs_url=None,
        redoc_url=None,
    )
    rates = RateLimits(1 / max(1, settings.api_processes))
    sampler = Sampler(settings.sampler, settings.data_dir.resolve() / "sampler", blobs) if settings.sampler else None
    app.state.service = ApiService(settings, database, blobs, Metrics(database), rates, sampler)
    errors.install(app)
    # Routes are tried one after another: what clients poll comes first.
    for router in (
        job_router,
        event_router,
        file_router,
        upload_router,
        model_router,
        chat_router,
        usage_router,
        worker_router,
        health_router,
        dashboard_router,
    ):
        app.include_router(router)
    app.add_middleware(RequestObserver, metrics=app.state.service.metrics)
    app.polled = PolledRoutes(app, app.state.service.metrics)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _threads(app: FastAPI) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
    yield


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Returns FastAPI's own description, with our bodies, our error object and the API key added."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        parts = schema.setdefault("components", {})
        schemas = parts.setdefault("schemas", {})
        for model in BODIES:
            body = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= body.pop("$defs", {})
            schemas[model.__name__] = body
        schemas["Error"] = _ERROR
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {
                    "description": "An error, in OpenAI's shape.",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
        for route in app.routes:
            if isinstance(route, APIRoute) and route.path.startswith(("/v1", "/dashboard/overview")):
                for method in route.methods or ():
                    schema["paths"][route.path_format][method.lower()]["security"] = [{"key": []}]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


LOG = logging.getLogger("weft.serve")
GRACE_S = 8
"""How many seconds requests in flight have once the process is to stop."""


class _Server(uvicorn.Server):
    """A server that notifies the app and the caller when it is about to stop, so that streams end and workers drain."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._api, self._on_stop = app, on_stop
        self._signal = ""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Logs that it stops and why; a signal handler could be in the middle of another line of the log."""
        LOG.info("stopping", extra={"fields": {"signal": self._signal, "grace_s": GRACE_S}})
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(sig).name
        self._api.state.service.is_draining = True
        self._on_stop()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that accepts connections at once; port 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"{host}:{port} cannot be used ({error.strerror or error}).", where="--port") from None
    sock.listen(2048)
    return sock


def run_app(app: FastAPI, sock: socket.socket, on_stop: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGTERM or SIGINT; returns when the last request is answered or the grace is over."""
    allow_many_connections()
    server = make_server(app, on_stop)
    # uvicorn installs its handlers a little later, and a signal until then must not be lost. It also raises the signal
    # again when it is done.
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_server(app: FastAPI, on_stop: Callable[[], None] = lambda: None) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=TimedConnection,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=65,
        # A client could forge these headers, so they must not reach the log.
        proxy_headers=False,
    )
    return _Server(config, app, on_stop)


health_router = APIRouter(tags=["Operations"])


@health_router.get("/healthz")
async def healthz() -> dict[str, Any]:
    """Reports that the process is alive, and nothing else."""
    return {"status": "ok", "version": __version__}


@health_router.get("/readyz")
def readyz(request: Request) -> dict[str, Any]:
    """The database answers and the process is not about to stop; also how many workers are alive."""
    service = service_of(request)
    if service.is_draining:
        raise unavailable("The server is stopping.", "draining")
    with service.database.read() as tx:
        tx.execute(sa.select(1))
        num_workers = len(live_workers(tx))
    return {"status": "ready", "workers": num_workers}


@health_router.get("/metrics", response_class=Response)
def metrics(request: Request, user: Operator) -> Response:
    """Prometheus' format; needs a key with the scope `admin`."""
    return Response(service_of(request).metrics.text(), headers={"content-type": CONTENT_TYPE})


_POLLED = re.compile(rf"{job_router.prefix}(?:/([^/]+))?")
_caller = needs("jobs")


@dataclass(frozen=True)
class _Route:
    path: str


_ONE, _ALL = _Route(f"{job_router.prefix}/{{job_id}}"), _Route(job_router.prefix)


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
    return await (list_jobs(request, user) if job_id is None else retrieve(request, user, job_id))
