"""The dashboard's routes: the page, its files, and the overview it polls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from weft.serve.api.service import ApiService, Caller, Viewer, service_of
from weft.serve.dashboard import overview
from weft.serve.dashboard.overview import SAMPLE_S, History
from weft.serve.db.engine import now
from weft.serve.db.tenants import LIMITS, list_keys
from weft.serve.errors import Busy, NotFound

PAGE = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files of other kinds are not served."""


@dataclass(frozen=True)
class Asset:
    content: bytes
    kind: str
    tag: str
    """Changes with the content: browsers send it to check that their copy is current."""


@functools.cache
def assets() -> Mapping[str, Asset]:
    """Every file of the page by its path in `static`."""
    return dict(_walk(files(__package__) / "static", ""))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _walk(entry, f"{name}/")
            continue
        kind = next((kind for end, kind in KINDS.items() if name.endswith(end)), None)
        if kind is not None:
            content = entry.read_bytes()
            yield name, Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:24]}"')


HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # Requested again every time, answered with 304 while it is the same: an upgrade shows at once.
    "cache-control": "no-cache",
}
"""Headers by which the browser loads only our own files and lets no other site frame the page."""


@contextlib.asynccontextmanager
async def _sampling(app: FastAPI) -> AsyncIterator[None]:
    """Records the workers' speed while the app runs, so that the charts are filled when the page is opened."""
    task = asyncio.create_task(_sample(app))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _sample(app: FastAPI) -> None:
    while True:
        # A database that is away leaves a gap in the charts.
        with contextlib.suppress(Busy):
            await run_in_threadpool(_history(app).sample, app.state.service.database)
        await asyncio.sleep(SAMPLE_S)


router = APIRouter(tags=["Dashboard"], lifespan=_sampling)


@router.get("/", include_in_schema=False)
def page(request: Request) -> Response:
    """The page itself; it holds no tenant's data and needs no key."""
    return _answer(request, assets()[PAGE])


@router.get("/dashboard/static/{name:path}", include_in_schema=False)
def static(request: Request, name: str) -> Response:
    """A file of the page."""
    asset = assets().get(name)
    if asset is None:
        raise NotFound("There is no such file of the dashboard.")
    return _answer(request, asset)


@router.get("/dashboard/overview")
def read_overview(request: Request, user: Viewer, months: Annotated[int, Query(ge=0, le=24)] = 0) -> dict[str, Any]:
    """Workers, queue and limits as of now; with `months` also the usage of the last months and, for operators, keys."""
    service = service_of(request)
    history = _history(request.app)
    history.sample(service.database)
    return {"object": "dashboard.overview", **_overview(service, user, months), "history": history.points()}


def _overview(service: ApiService, user: Caller, months: int) -> dict[str, Any]:
    is_admin = "admin" in user.scopes
    with service.database.read() as tx:
        at = now(tx)
        by_tenant = overview.queues(tx, None if is_admin else user.tenant)
        view = {
            "at": at,
            "is_admin": is_admin,
            "tenant": {name: user.owner[name] for name in ("id", "name", *LIMITS)},
            "workers": overview.workers_view(tx, user.tenant, sees_all=is_admin),
            "queue": overview.total_queue(by_tenant),
            "queue_of_tenant": by_tenant.get(user.tenant, {"queue": {}})["queue"],
        }
        if months:
            view["usage"] = overview.usage_view(tx, user.tenant, months, at)
        if is_admin:
            view["tenants"] = overview.tenants_view(tx, by_tenant)
        if is_admin and months:
            view["keys"] = list_keys(tx)
    return view


def _history(app: FastAPI) -> History:
    history: History | None = getattr(app.state, "dashboard_history", None)
    if history is None:
        history = app.state.dashboard_history = History()
    return history


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "etag": asset.tag}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.kind, headers=headers)
