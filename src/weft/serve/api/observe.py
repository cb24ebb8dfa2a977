"""Gives every request an id, a time, one line in the log, and an unrevealing 500 if something breaks.

The log is one JSON object per line with the ids of request, tenant, key and job. It never contains bodies, query
strings, headers or keys.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
import sys
import time
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serve.api.errors import ApiError, as_api_error
from weft.serve.api.metrics import Metrics

LOG = logging.getLogger("weft.serve")
CLIENT_GONE = 499
"""The status in the log for a client that hung up before its request was complete."""


class JsonLines(logging.Formatter):
    """Formats each log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's time, level, message and fields as JSON."""
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
    """Formats unix seconds as a date and time of day."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def log_json(level: int = logging.INFO) -> None:
    """Makes the service and its HTTP server log to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("weft.serve", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level if name == "weft.serve" else logging.WARNING)


class RequestObserver:
    """The app's outermost layer, which counts and logs every request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
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
    """Refuses a NUL in a path or query: nobody means it, and each database refuses it in its own way."""
    if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
        return ApiError(400, "The URL holds a NUL character.", code="invalid_url")
    return None
