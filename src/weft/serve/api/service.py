"""What the routes of one API process share: the service itself, the caller of a request, and the models by name.

A caller is a tenant whose key has the scope that the route needs, or `default` without authentication.

`ReadCache` keeps answers that were read from the database, for as long as they are still true.
Many clients poll: whether their job is done, what is in the list, whether a key is valid.
SQLite reports in microseconds whether any connection, in any process, has committed since the last look (`PRAGMA
data_version`); until then every answer is still true. After a commit, which a worker makes about twice a second, an
answer whose rows are known is checked against those rows: most jobs have not changed, and the check takes a tenth of
the time of making the answer again. So a revoked key is refused from the next request on, and a client
sees its own changes. PostgreSQL has no such number; there everything is read each time.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from weft.job_state import FINAL_STATES
from weft.serve.api.errors import ApiError, too_many, unavailable
from weft.serve.api.observe import Metrics
from weft.serve.blobs import Blobs
from weft.serve.db import adapters, files, jobs, tenants
from weft.serve.db.engine import Database, DbRow, Tx, WatchedRows
from weft.serve.db.tenants import DEFAULT_TENANT, SCOPES, find_key, get_tenant, needs_touch, touch_key, watched_key
from weft.serve.errors import Busy, NotFound, NotPossible
from weft.serve.settings import Settings

if TYPE_CHECKING:
    from weft.serve.api.sampler import Sampler

MAX_KEPT = 1000
T = TypeVar("T")


@dataclass
class _CachedRead:
    found: Any
    watched: WatchedRows | None
    rows: list[tuple[Any, ...]]
    """The watched rows as they were in the snapshot from which the answer was made."""
    version: int
    """The version of the database at which the answer was last known to be true."""


class ReadCache:
    """Answers of reads that clients repeat; it is used on the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._version: int | None = None
        self._kept: dict[Hashable, _CachedRead] = {}
        self._cursor: Any = None

    async def read(self, key: Hashable | None, look: Callable[[Tx], T], watched: WatchedRows | None = None) -> T:
        """Returns what `look` finds now; `key` names everything that this depends on besides the database.

        `watched` are all rows that the answer depends on, if they are few. On SQLite `look` runs right here, which
        takes less time than handing it to a thread, so it must be short. A `look` that may take long is given no key:
        it runs in a thread, and its answer is not kept.
        """
        if key is None or not self._database.is_sqlite:
            return await run_in_threadpool(self._look, look)
        with self._lock:
            version = self._forget_if_changed()
            kept = self._kept.get(key)
            if kept is None or not self._is_true(kept, version):
                kept = self._keep(key, look, watched, version)
            return cast(T, kept.found)

    def _look(self, look: Callable[[Tx], T]) -> T:
        with self._database.read() as tx:
            return look(tx)

    def _keep(self, key: Hashable, look: Callable[[Tx], T], watched: WatchedRows | None, version: int) -> _CachedRead:
        """Makes an answer and keeps it. The version was read before, so the answer may be newer, but never older."""
        with self._database.read() as tx:
            # SQLAlchemy would take a millisecond for forty columns, so this goes past it.
            rows = [] if watched is None else tx.connection.cursor().execute(watched.sql, watched.values).fetchall()
            kept = _CachedRead(look(tx), watched, rows, version)
        self._kept.pop(key, None)
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = kept
        return kept

    def _is_true(self, kept: _CachedRead, version: int) -> bool:
        if kept.version != version:
            if kept.watched is None or self._rows(kept.watched.sql, kept.watched.values) != kept.rows:
                return False
            kept.version = version
        return True

    def _forget_if_changed(self) -> int:
        """Returns the version of the database; if it is a new one, answers without watched rows are forgotten."""
        if self._cursor is None:
            # The number changes with commits of other connections only, so this connection never commits.
            connection = self._database.engine.raw_connection()
            connection.detach()
            weakref.finalize(self, connection.close)
            self._cursor = connection.cursor()
        ((version,),) = self._rows("PRAGMA data_version")
        if version != self._version:
            self._kept = {key: kept for key, kept in self._kept.items() if kept.watched is not None}
            self._version = version
        return int(version)

    def _rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return cast(list[tuple[Any, ...]], self._cursor.execute(sql, values).fetchall())
        except sqlite3.OperationalError as error:
            raise Busy("the database cannot be read at the moment; try again.") from error


class RateLimits:
    """Limits each tenant's requests per minute in this process: a bucket fills evenly and holds one minute's worth."""

    def __init__(self, share: float = 1.0) -> None:
        """`share` is the part of a tenant's limit that this process may grant."""
        self._share = share
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, tenant: str, per_minute: int | None) -> float:
        """Counts a request and returns 0 if it may pass; otherwise returns the seconds until one may."""
        if per_minute is None:
            return 0.0
        most = max(1.0, per_minute * self._share)
        rate = most / 60
        at = time.monotonic()
        with self._lock:
            level, seen = self._buckets.get(tenant, (most, at))
            level = min(most, level + (at - seen) * rate)
            if level < 1:
                self._buckets[tenant] = (level, at)
                return (1 - level) / rate if per_minute else 60.0
            self._buckets[tenant] = (level - 1, at)
            return 0.0


@dataclass
class ApiService:
    settings: Settings
    database: Database
    blobs: Blobs
    metrics: Metrics
    rates: RateLimits = field(default_factory=RateLimits)
    sampler: Sampler | None = None
    """What answers prompts instead of the workers."""
    is_draining: bool = False
    touched: dict[str, float] = field(default_factory=dict)
    """When this process last noted that a key was used, by the key's id."""
    checked: dict[tuple[str | int | None, ...], int] = field(default_factory=dict)
    """The number of samples in files that passed the check, by blob, requested format and fewest lines."""

    silent_workers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read_cache = ReadCache(self.database)


def service_of(request: Request) -> ApiService:
    return cast(ApiService, request.app.state.service)


OWNER = "weft"


@dataclass(frozen=True)
class ResolvedModel:
    base: str
    blob: str | None
    """The adapter's archive, or its folder as in `adapters.source_of`; None is the bare backbone."""
    created: int
    owner: str
    job: str | None = None
    worker: str | None = None
    """The only worker that can answer."""
    bytes: int | None = None
    """Size of a fine-tuned model's archive; that of a checkpoint is not kept."""


def resolve_model(tx: Tx, service: ApiService, tenant: str, name: str) -> ResolvedModel:
    if name in service.settings.base_models:
        return ResolvedModel(name, None, 0, OWNER)
    if service.settings.adapters is not None and ":" not in name:
        shared = adapters.find_adapter(tx, service.settings.adapters, name)
        if shared is not None:
            if shared["error"] is not None:
                raise NotPossible(f"The adapter '{name}' cannot be used: {shared['error']}", where="model")
            source, created = adapters.source_of(shared), shared["created_at"]
            return ResolvedModel(shared["base"], source, created, OWNER, bytes=shared["bytes"])
    if ":ckpt-step-" not in name:
        row = files.get_model(tx, tenant, name)
        return ResolvedModel(row["base"], row["blob"], row["created_at"], tenant, row["job"], bytes=row["bytes"])
    try:
        row = files.get_checkpoint(tx, tenant, name)
    except NotFound:
        raise files.missing_model(name) from None
    if row["blob"] is None:
        raise files.missing_model(name)
    base = jobs.get_job(tx, tenant, row["job"])["model"]
    return ResolvedModel(base, row["blob"], row["created_at"], tenant, row["job"])


def resolve_prompted(tx: Tx, service: ApiService, tenant: str, name: str) -> ResolvedModel:
    """As `resolve_model`, for prompts: also a job that trains, by its id or by the name that its model will have."""
    job: DbRow | None
    if name.startswith(JOB_ID):
        job = jobs.get_job(tx, tenant, name)
    else:
        try:
            return resolve_model(tx, service, tenant, name)
        except NotFound:
            job = files.job_of_model(tx, tenant, name)
            if job is None or job["status"] in FINAL_STATES:
                raise
    if job["fine_tuned_model"] is not None:
        return resolve_model(tx, service, tenant, job["fine_tuned_model"])
    if job["status"] != "running" or job["worker"] is None:
        found = f"The job '{job['id']}' is {job['status'].replace('_', ' ')}"
        raise NotPossible(f"{found}; jobs that run or have succeeded can be prompted, and checkpoints.", where="model")
    return ResolvedModel(job["model"], adapters.source_of_job(job), 0, tenant, job["id"], job["worker"])


JOB_ID = "ftjob-"


@dataclass(frozen=True)
class Caller:
    """The tenant that sent a request with a valid key, and its names in logs and the audit table."""

    tenant: str
    owner: DbRow
    key: str | None
    scopes: tuple[str, ...]
    request: str

    def note(self, tx: Tx, action: str, object: str = "", data: Any = None) -> None:
        """Adds an action to the audit table, in the transaction that performs it."""
        tenants.add_audit(tx, self.tenant, action, object, key=self.key, request=self.request, data=data)


def needs(*scopes: str) -> Callable[[Request], Awaitable[Caller]]:
    """Makes a FastAPI dependency that returns the caller, provided its key has one of these scopes."""
    assert set(scopes) <= set(SCOPES)

    async def caller(request: Request) -> Caller:
        service = service_of(request)
        if service.is_draining and request.method == "POST":
            raise unavailable("The server is stopping.", "draining")
        found = await _caller(request, service)
        request.state.log.update(tenant=found.tenant, key=found.key)
        if not set(scopes) & set(found.scopes):
            wanted = " or ".join(f"'{scope}'" for scope in scopes)
            message = f"This key lacks the scope {wanted}; it has {', '.join(found.scopes)}."
            raise ApiError(403, message, code="missing_scope")
        wait_s = service.rates.wait_s(found.tenant, found.owner["max_requests_per_minute"])
        if wait_s > 0:
            limit = found.owner["max_requests_per_minute"]
            message = f"Rate limit reached: {limit:,} requests per minute. Try again in {wait_s:.1f} s."
            raise too_many(message, "rate_limit_exceeded", retry_after_s=math.ceil(wait_s))
        return found

    caller.scopes = scopes  # type: ignore[attr-defined]
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
Viewer = Annotated[Caller, Depends(needs("usage", "admin"))]
Operator = Annotated[Caller, Depends(needs("admin"))]
"""Parameters of routes: the caller, whose key must have that scope, or one of them."""
