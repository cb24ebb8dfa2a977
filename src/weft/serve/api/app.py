"""Puts the app together from its routes, errors, logs and limits. It never imports torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from weft import __version__
from weft.serve import dashboard
from weft.serve.api import errors
from weft.serve.api.bodies.requests import BODIES
from weft.serve.api.metrics import Metrics
from weft.serve.api.observe import RequestObserver
from weft.serve.api.routes import chat, events, files, health, jobs, models, uploads, usage, workers
from weft.serve.api.routes.polled import PolledRoutes
from weft.serve.api.service import ApiService, RateLimits
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database
from weft.serve.settings import Settings

NUM_THREADS = 100
"""How many requests are worked on at once; most of their time they wait for the database or a worker."""


class _App(FastAPI):
    """FastAPI, with the polled routes answered in front of it."""

    polled: PolledRoutes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or the app's start and end."""
        if not await self.polled.answers(scope, receive, send):
            await super().__call__(scope, receive, send)


def make_app(settings: Settings, database: Database, blobs: Blobs) -> FastAPI:
    """Returns the service as an ASGI app; the caller has migrated the database."""
    app = _App(
        title="Weft",
        version=__version__,
        description="Fine-tuning behind OpenAI's API: many adapters at once on one frozen model.",
        redirect_slashes=False,
        lifespan=_threads,
        # FastAPI's own pages load their scripts from the internet, which may be out of reach.
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = ApiService(
        settings, database, blobs, Metrics(database), RateLimits(1 / max(1, settings.api_processes))
    )
    errors.install(app)
    # Routes are tried one after another: what clients poll comes first.
    for part in (jobs, events, files, uploads, models, chat, usage, workers, health, dashboard):
        app.include_router(part.router)
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
