"""Gives every request an id, a time, one line in the log, and an unrevealing 500 if something breaks; counts them all.

The log is one JSON object per line with the ids of request, tenant, key and job. It never contains bodies, query
strings, headers or keys. The metrics are Prometheus's: what this process has served, and jobs and
workers as the database has them now.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serve.api.errors import ApiError, as_api_error
from weft.serve.db.engine import Database, total
from weft.serve.db.jobs import STATES
from weft.serve.db.tables import FILES, JOBS, MODELS, USAGE
from weft.serve.db.usage import KINDS
from weft.serve.db.workers import live_workers

LOG = logging.getLogger("weft.serve")
CLIENT_GONE = 499
"""The status in the log for a client that hung up before its request was complete."""


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{_clock(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


_encode = json.JSONEncoder(default=str).encode
"""The encoder is made once because every request writes a line."""


@functools.lru_cache(1)
def _clock(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the time, since a program that contains the service may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_json() -> None:
    """Makes the service and its HTTP server log to stderr as JSON lines."""
    handler = _StandardError()
    handler.setFormatter(JsonLines())
    # Libraries warn as they train; what they write must not break the lines.
    logging.captureWarnings(True)
    for name in ("weft.serve", "uvicorn", "uvicorn.error", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if name == "weft.serve" else logging.WARNING)


class RequestObserver:
    """The app's outermost layer, which counts and logs every request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(request_id=request, log={})
        started, status = time.perf_counter(), 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request.encode())]
            await send(message)

        self._metrics.active.inc()
        try:
            refusal = _refusal(scope)
            await (refusal.response()(scope, receive, reply) if refusal else self._app(scope, receive, reply))
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            # This is the boundary of the process: the error is a bug of ours, and other requests must be served.
            LOG.exception("a request failed", extra={"fields": {"request": request}})
            if status == 0:
                await as_api_error(error).response()(scope, receive, reply)
        finally:
            self._metrics.active.dec()
            self._note(scope, status, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.note(method, route, status, seconds)
        state = scope["state"]
        fields = {"request": state["request_id"], "method": method, "route": route, "status": status}
        LOG.info("request", extra={"fields": {**fields, "ms": round(seconds * 1000, 1), **state["log"]}})


_METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS")


def _refusal(scope: Scope) -> ApiError | None:
    """Refuses a NUL in a path or query: it is never meant, and each database refuses it in its own way."""
    if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
        return ApiError(400, "The URL holds a NUL character.", code="invalid_url")
    return None


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    def __init__(self, database: Database) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("weft_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "weft_http_request_seconds", "Time to answer.", labels[:2], buckets=_SECONDS, registry=self.registry
        )
        self.active = Gauge("weft_http_requests_active", "Requests being answered.", registry=self.registry)
        self.uploaded = Counter("weft_uploaded_bytes", "Bytes of files taken in.", registry=self.registry)
        self._of_route: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self.registry.register(_DatabaseFigures(database))

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        # Looking a counter up by its labels takes longer than counting.
        found = self._of_route.get((method, route, status))
        if found is None:
            found = self.requests.labels(method, route, str(status)), self.seconds.labels(method, route)
            self._of_route[method, route, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _DatabaseFigures(Collector):
    """Figures of the whole service: every process reports the same."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not need the database."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Reads all figures in one transaction."""
        jobs = GaugeMetricFamily("weft_jobs", "Jobs by state.", labels=("state",))
        tokens = CounterMetricFamily("weft_tokens", "Tokens by kind.", labels=("kind",))
        stored = GaugeMetricFamily("weft_stored_bytes", "Bytes kept by kind.", labels=("kind",))
        workers = GaugeMetricFamily("weft_workers", "Workers alive.", labels=("base_model", "draining"))
        speed = GaugeMetricFamily("weft_worker_info", "A number that a worker reports.", labels=("worker", "what"))
        with self._database.read() as tx:
            counts: dict[str, int] = dict(
                tx.execute(sa.select(JOBS.c.status, sa.func.count()).group_by(JOBS.c.status)).all()
            )
            for state in STATES:
                jobs.add_metric((state,), counts.get(state, 0))
            trained = total(tx, JOBS.c.trained_tokens)
            used = tx.execute(sa.select(USAGE.c.kind, sa.func.sum(USAGE.c.tokens)).group_by(USAGE.c.kind))
            by_kind = {**dict.fromkeys(KINDS, 0), "trained": trained, **dict(used.all())}
            for kind, count in by_kind.items():
                tokens.add_metric((kind,), float(count))
            for kind, table in (("files", FILES), ("models", MODELS)):
                stored.add_metric((kind,), float(total(tx, table.c.bytes, table.c.deleted_at.is_(None))))
            alive = live_workers(tx)
        groups = [(w["base_model"], str(w["is_draining"]).lower()) for w in alive]
        for group in sorted(set(groups)):
            workers.add_metric(group, groups.count(group))
        for worker in alive:
            for what, value in sorted((worker["info"] or {}).items()):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    speed.add_metric((worker["id"], what), value)
        return [jobs, tokens, stored, workers, speed]
