"""Turns every error, whatever raised it, into OpenAI's `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from weft.errors import ConfigError, DataError, StorageError, WeftError
from weft.serve.api.bodies.problems import in_words
from weft.serve.errors import Busy, Conflict, NotFound, NotPossible, OverLimit

LOG = logging.getLogger("weft.serve")
RETRY_AFTER_S = 2
ROUTES = "here are files, uploads, fine_tuning/jobs, models, chat/completions, completions and usage"
HIDDEN = "The server had an error while processing your request; quote the x-request-id to its operator."


class ApiError(Exception):
    """An answer with a status of 400 or more."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code, **more}}

    def response(self) -> Response:
        """Returns the error as an HTTP answer."""
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None, **more: Any) -> ApiError:
    """Makes a 400: the request is wrong, and sending it again will not help."""
    return ApiError(400, message, param=param, code=code, **more)


def too_many(message: str, code: str, *, retry_after_s: int | None, type: str = "requests") -> ApiError:
    """Makes a 429; without `retry_after_s` it tells the SDK not to try again."""
    headers = {"x-should-retry": "false"} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return ApiError(429, message, code=code, type=type, headers=headers)


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Makes a 503: the same request may succeed a little later."""
    return ApiError(503, message, code=code, type="server_error", headers={"retry-after": str(retry_after_s)})


def install(app: FastAPI) -> None:
    """Makes the app answer errors in this form instead of FastAPI's."""
    app.add_exception_handler(ApiError, lambda request, error: _api_error(error))
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(WeftError, lambda request, error: as_api_error(error).response())


def as_api_error(error: Exception) -> ApiError:
    """Returns what an error of Weft means to the client; any other error is a 500 that hides what happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NotFound):
        code = "model_not_found" if error.where == "model" else None
        return ApiError(404, error.message, param=error.where, code=code)
    if isinstance(error, NotPossible):
        return invalid(error.message, error.where, error.code)
    if isinstance(error, Conflict):
        return ApiError(409, error.message, code=error.code, headers={"x-should-retry": "false"})
    if isinstance(error, OverLimit):
        return too_many(error.message, error.code, retry_after_s=None, type="insufficient_quota")
    if isinstance(error, Busy):
        return unavailable(error.message, error.code)
    if isinstance(error, StorageError):
        LOG.error("storage", extra={"fields": {"error": str(error)}})
        return unavailable("The file store cannot be written at the moment; try again later.", error.code, 30)
    if isinstance(error, ConfigError | DataError):
        text = f"{error.message} {error.hint}" if error.hint else error.message
        return invalid(f"{error.where}: {text}" if error.where else text, error.where, error.code)
    return ApiError(500, HIDDEN, type="server_error")


def _api_error(error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


def from_validation(problems: Any, body: Any = None, known: Sequence[str] = ()) -> ApiError:
    """Makes a 400 of pydantic's problems; `body` is what was sent, if anything, `known` the names of its fields."""
    refusal = in_words(problems, body, known)
    return invalid(refusal.message, refusal.param, refusal.code)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"Invalid URL ({request.method} {request.url.path})"
        is_below = request.url.path.startswith("/v1")
        message += f"; {ROUTES}." if is_below else "; the API is below /v1, which belongs in the base URL."
    elif error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}"
    else:
        message = str(error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()
